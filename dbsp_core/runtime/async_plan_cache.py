"""Plans evaluated and made by a thread, while the attention that they are for is computed."""

from __future__ import annotations

import atexit
import functools
import queue
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from dbsp_core.comm.consistency import check_consistent
from dbsp_core.comm.groups import CommunicationError, SequenceGroup
from dbsp_core.masks.block_mask import BlockMask
from dbsp_core.planning.plan import Plan
from dbsp_core.runtime.plan_cache import KeptPlan, MakePlan, PlanCache, Planned, new_plan

__all__ = ["AsyncPlanCache", "PlanningThread"]

PLANS_DIFFER = "the plan differs on rank(s) {}; all ranks must compute the same masks"

LAST_JOBS_S = 3.0
"""Seconds that the end of the program waits for jobs under way. A thread that the interpreter stops within a tensor
operation aborts the process."""


@dataclass(frozen=True)
class _Call:
    """One call of an attention, as the thread gets it.

    Attributes:
        kept: The plan that the call uses.
        event: Event on the call's stream, where its mask is on a GPU: the mask is computed once it is reached.
    """

    kept: KeptPlan
    mask: BlockMask
    make: MakePlan
    name: Hashable | None
    event: torch.cuda.Event | None


@dataclass(frozen=True)
class _Evaluation:
    """What the thread found out about a call.

    Attributes:
        used: The plan of the call, with the numbers of its mask.
        next: The plan of the attention's next call.
        new: Whether that is another plan.
    """

    used: KeptPlan
    next: KeptPlan
    new: bool


@dataclass
class AsyncPlanCache(PlanCache):
    """A `PlanCache` one call behind: a call uses the plan that was settled for the last one, and never waits for its
    own mask to be counted.

    While a call computes, a thread evaluates its mask under the plan in use, makes a new plan if that has expired, and
    compares it with the other ranks over a process group of its own. The next call of that attention adopts the
    outcome, waiting for it if it is late: so all ranks change plans at the same call. What went wrong in the thread,
    on any rank, is raised at that call on every rank. An attention's first call plans at once.
    """

    group: SequenceGroup = field(kw_only=True)
    _due: dict[Hashable, _Call] = field(default_factory=dict)
    _pending: dict[Hashable, Future[_Evaluation]] = field(default_factory=dict)
    _thread_group: SequenceGroup = field(init=False)
    _thread: PlanningThread = field(init=False)
    _side_streams: dict[torch.device, torch.cuda.Stream] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._thread_group = self.group.auxiliary("planning")  # in the calling thread: making a group is a collective
        self._thread = _thread_of(self._thread_group)

    def plan_for(
        self,
        key: Hashable,
        mask: BlockMask,
        make: MakePlan,
        name: Hashable | None = None,
    ) -> Planned:
        """The plan to use for this call; its numbers are those of a mask before it, or of the one it was made for.

        Raises RuntimeError on every rank when planning failed, or plans differed, on any.
        """
        self.counters.calls += 1
        self._adopt(key)
        kept = self._kept.get(key)
        if kept is None or not kept.plan.fits(mask):
            self.counters.replans += 1
            kept = new_plan(kept, mask, make, name)
            self._kept[key] = kept
        event = torch.cuda.current_stream(mask.bits.device).record_event() if mask.bits.is_cuda else None
        self._due[key] = _Call(kept, mask, make, name, event)
        return Planned(kept.plan)

    def start(self) -> None:
        """Lets the thread evaluate the calls since: best when their own work is queued on the device.

        It would slow the calling thread down until then. Whatever waits for the thread starts it too.
        """
        for key in list(self._due):
            self._pending[key] = self._thread.submit(functools.partial(self._run, self._due.pop(key)))

    def count_reuse(self, key: Hashable, plan: Plan, name: Hashable | None = None) -> bool:
        self._adopt(key)
        kept = self._kept.setdefault(key, KeptPlan(plan))
        used = kept.used_with(plan)
        if not kept.plan.same_routes(plan) or used.expired(self.threshold, name):
            return False
        self.counters.calls += 1
        self._keep(key, used)
        return True

    def forget(self, key: Hashable) -> None:
        """See `PlanCache`; waits for what is pending for the attention."""
        self._adopt(key)
        super().forget(key)

    def flush(self) -> None:
        self.start()
        for key in list(self._pending):
            self._adopt(key)

    def _adopt(self, key: Hashable) -> None:
        if key in self._due:
            self.start()
        pending = self._pending.pop(key, None)
        if pending is None:
            return
        limit = None if self.group.timeout is None else self.group.timeout.total_seconds()
        try:
            evaluation = pending.result(limit)
        except FutureTimeoutError as error:
            raise RuntimeError(
                f"the planning thread of rank {self.group.rank} has not answered for {limit:g} s, the process group's "
                "timeout; something in it stands still"
            ) from error
        self.counters.add(evaluation.used.plan)
        self.counters.replans += evaluation.new
        self.latest[key], self._kept[key] = evaluation.used.plan, evaluation.next

    def _run(self, call: _Call) -> _Evaluation:
        """Runs in the thread. Collective on its own group."""
        problem: Exception | None = None
        evaluation, fingerprint = None, 0
        try:
            evaluation = self._found_out(call)
            fingerprint = evaluation.next.plan.fingerprint
        except Exception:
            problem = RuntimeError(f"planning failed:\n{traceback.format_exc()}")
        check_consistent(self._thread_group, problem, {PLANS_DIFFER: fingerprint}, RuntimeError)
        if evaluation is None:
            raise RuntimeError("planning failed") from problem
        return evaluation

    def _found_out(self, call: _Call) -> _Evaluation:
        with self._own_stream(call.mask.bits.device, call.event):
            used, chosen, new = self._evaluate(call.kept, call.mask, call.make, call.name)
        return _Evaluation(used, chosen, new)

    def _own_stream(self, device: torch.device, event: torch.cuda.Event | None) -> AbstractContextManager[object]:
        """A stream of the thread's own, which waits only for the mask, not for what else the device computes.

        Makes the device the thread's current one: a new thread begins with GPU 0, and leaving a stream's context
        returns to the current device, which opens a context there on every rank.
        """
        if event is None:
            return nullcontext()
        torch.cuda.set_device(device)
        if device not in self._side_streams:
            self._side_streams[device] = torch.cuda.Stream(device)
        self._side_streams[device].wait_event(event)
        return torch.cuda.stream(self._side_streams[device])


_Jobs = queue.SimpleQueue["tuple[Future[Any], Callable[[], Any]] | None"]


class PlanningThread:
    """Runs jobs one after the other in a thread, which ends with this object or with the program.

    The order matters: jobs may hold collectives, which every rank must enter in the same order. Once communication
    has broken off in one, later ones are not begun, and raise the same: each would wait for the others' timeout again.
    """

    def __init__(self) -> None:
        self._jobs: _Jobs = queue.SimpleQueue()
        self._started = False

    def submit(self, job: Callable[[], Any]) -> Future[Any]:
        """Queues a job. Returns what will hold its result, or what it raises."""
        if not self._started:
            self._start()
        future: Future[Any] = Future()
        self._jobs.put((future, job))
        return future

    def _start(self) -> None:
        # A daemon, so that a job that hangs does not keep the program from ending.
        thread = threading.Thread(target=_work, args=(self._jobs,), name="dbsp-planning", daemon=True)
        thread.start()
        _RUNNING[thread] = self._jobs
        weakref.finalize(self, self._jobs.put, None).atexit = False
        self._started = True


_THREADS: weakref.WeakKeyDictionary[dist.ProcessGroup, PlanningThread] = weakref.WeakKeyDictionary()
_RUNNING: weakref.WeakKeyDictionary[threading.Thread, _Jobs] = weakref.WeakKeyDictionary()


def _thread_of(group: SequenceGroup) -> PlanningThread:
    """One thread for all that use a group of this kind: two would enter its collectives in any order."""
    process_group = group.group
    return PlanningThread() if process_group is None else _THREADS.setdefault(process_group, PlanningThread())


def _work(jobs: _Jobs) -> None:
    broken: CommunicationError | None = None
    while (job := jobs.get()) is not None:
        future, do = job
        try:
            if broken is not None:
                raise broken
            future.set_result(do())
        except CommunicationError as error:
            broken = error
            future.set_exception(error)
        except BaseException as error:  # to be raised where the result is asked for
            future.set_exception(error)
        del job, future, do  # or the last job's tensors would be held until the next one comes


@atexit.register
def _end() -> None:
    running = list(_RUNNING.items())
    for _, jobs in running:
        jobs.put(None)
    for thread, _ in running:
        thread.join(LAST_JOBS_S)
    if running:
        time.sleep(0.02)  # gloo's threads need the interpreter to release the last collective's tensors
