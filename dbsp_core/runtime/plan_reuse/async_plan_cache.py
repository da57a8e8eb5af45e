"""Plans evaluated and made by a thread, while the attention that they are for is computed."""

from __future__ import annotations

import functools
import traceback
import weakref
from collections.abc import Hashable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from dbsp_core.comm.consistency import check_consistent
from dbsp_core.comm.groups import SequenceGroup
from dbsp_core.masks.block_mask import BlockMask
from dbsp_core.planning.plan import Plan
from dbsp_core.runtime.plan_reuse.plan_cache import PlanCache, PlanMaker, Planned
from dbsp_core.runtime.plan_reuse.planning_thread import PlanningThread
from dbsp_core.runtime.plan_reuse.rule import PlanUsage

__all__ = ["AsyncPlanCache"]

PLANS_DIFFER = "the plan differs on rank(s) {}; all ranks must compute the same masks"


@dataclass(frozen=True)
class _Evaluation:
    """used: the plan in use with the numbers of the mask it was used for;  next: what the next call uses"""

    used: Plan
    next: Planned


@dataclass(frozen=True)
class _Call:
    """What the thread is given of a call. name: the mask's;  event: on the call's stream, behind its mask"""

    key: Hashable
    plan: Plan
    mask: BlockMask
    maker: PlanMaker
    name: Hashable | None
    event: torch.cuda.Event | None


@dataclass(kw_only=True)
class AsyncPlanCache(PlanCache):
    """As `PlanCache`, one call behind: a call uses the plan that was settled for the last one, and never waits for its
    own mask to be counted.

    While a call computes, a thread evaluates its mask under the plan in use, makes a new plan where `rule` asks for
    one, and compares it with the other ranks over a process group of its own. The next call of that attention adopts
    the outcome, waiting for it if it is late: so all ranks change plans at the same call. What went wrong in the
    thread, on any rank, is raised at that call on every rank. An attention's first call plans at once.
    """

    group: SequenceGroup
    _plans: dict[Hashable, Planned] = field(default_factory=dict)
    _due: dict[Hashable, _Call] = field(default_factory=dict)
    _pending: dict[Hashable, Future[_Evaluation]] = field(default_factory=dict)
    _thread_group: SequenceGroup = field(init=False)
    _thread: PlanningThread = field(init=False)
    _side_streams: dict[torch.device, torch.cuda.Stream] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._thread_group = self.group.beside("planning")  # in the calling thread: making a group is a collective
        self._thread = _thread_of(self._thread_group)

    def plan_for(self, key: Hashable, mask: BlockMask, maker: PlanMaker, name: Hashable | None = None) -> Planned:
        """The plan to use for this call; its numbers are those of the mask it was made for.

        Raises RuntimeError on every rank when planning failed, or plans differed, on any.
        """
        self.counters.calls += 1
        self._adopt(key)
        planned = self._plans.get(key)
        if planned is None or not planned.plan.fits(mask):
            self.counters.replans += 1
            planned = Planned(maker.make(mask, None if planned is None else planned.plan))
            self._usages[key] = PlanUsage.of(planned.plan, name)
        self._plans[key] = Planned(planned.plan)  # whoever gets the part keeps it
        event = torch.cuda.current_stream(mask.bits.device).record_event() if mask.bits.is_cuda else None
        self._due[key] = _Call(key, planned.plan, mask, maker, name, event)
        return planned

    def start(self) -> None:
        """Lets the thread evaluate what was asked for since: best when the calls' own work is queued on the device.

        It would slow this thread down until then. Whatever waits for the thread starts it too.
        """
        for key in list(self._due):
            self._pending[key] = self._thread.submit(functools.partial(self._run, self._due.pop(key)))

    def count_reuse(self, key: Hashable, plan: Plan, name: Hashable | None = None) -> bool:
        """As `PlanCache.count_reuse`, for the plan as the next call would have it."""
        self._adopt(key)
        planned = self._plans.setdefault(key, Planned(plan))
        return planned.plan.assignment.equals(plan.assignment) and super().count_reuse(key, plan, name)

    def begin_with(self, key: Hashable, other: Hashable) -> None:
        """As `PlanCache.begin_with`, with the other's plan as its next call would have it."""
        if key in self._plans or other not in self._plans:
            return
        self._adopt(other)
        super().begin_with(key, other)
        self._plans[key] = Planned(self._plans[other].plan)

    def forget(self, key: Hashable) -> None:
        """Drops what is kept for an attention, once nothing is pending for it."""
        self._adopt(key)
        self._plans.pop(key, None)
        super().forget(key)

    def flush(self) -> None:
        """Waits for what is pending, so that counters and `latest` cover every call."""
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
        self.counters.add(evaluation.used)
        self.counters.replans += evaluation.next.plan is not evaluation.used
        self.latest[key], self._plans[key] = evaluation.used, evaluation.next

    def _run(self, call: _Call) -> _Evaluation:
        """In the thread. Collective on its own group."""
        problem: Exception | None = None
        evaluation, fingerprint = None, 0
        try:
            evaluation = self._evaluate(call)
            fingerprint = evaluation.next.plan.assignment.fingerprint
        except Exception:
            problem = RuntimeError(f"planning failed:\n{traceback.format_exc()}")
        check_consistent(self._thread_group, problem, {PLANS_DIFFER: fingerprint}, torch.device("cpu"), RuntimeError)
        if evaluation is None:
            raise RuntimeError("planning failed") from problem
        return evaluation

    def _evaluate(self, call: _Call) -> _Evaluation:
        plan = call.plan
        with self._beside(call.mask.bits.device, call.event):
            used = plan.evaluate(call.mask, compare=self.compare)
            chosen = self._renewed(call.key, used, call.mask, call.maker, plan, call.name)
        moves = chosen is not used and not chosen.assignment.equals(plan.assignment)
        return _Evaluation(used, Planned(chosen, call.maker.rank_plan(chosen.assignment) if moves else None))

    def _beside(self, device: torch.device, event: torch.cuda.Event | None) -> AbstractContextManager[object]:
        """A stream of the thread's own, behind only the mask: what else the device computes is not waited for."""
        if event is None:
            return nullcontext()
        if device not in self._side_streams:
            self._side_streams[device] = torch.cuda.Stream(device)
        self._side_streams[device].wait_event(event)
        return torch.cuda.stream(self._side_streams[device])


_THREADS: weakref.WeakKeyDictionary[dist.ProcessGroup, PlanningThread] = weakref.WeakKeyDictionary()


def _thread_of(group: SequenceGroup) -> PlanningThread:
    """One thread for all that use a group of this kind: two would enter its collectives in any order."""
    process_group = group.group
    return PlanningThread() if process_group is None else _THREADS.setdefault(process_group, PlanningThread())
