"""Numbers collected while a transformer runs: one short record per attention, made only where a report is wanted.

Nothing here waits for a device: times are events on a GPU, timesteps stay where they are, until the run is over.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch

from dbsp_core.cost.latency import AttentionShape
from dbsp_core.masks.schedule import DenoisingStep, StepCounter
from dbsp_core.planning.assignment import Assignment
from dbsp_core.planning.plan import Plan
from dbsp_core.runtime.executor import AttentionExecutor
from dbsp_core.runtime.observer import SessionObserver
from dbsp_core.runtime.session import AttentionSession

__all__ = ["MOST_CALLS", "ObservedCall", "RunObserver", "SentBytes", "run_observer"]

MOST_CALLS = 200_000
"""Attentions that are kept, the latest; more than 40 generations of 50 steps, 40 layers and 2 guidance passes."""

Mark = torch.cuda.Event | float
"""A point in time: an event recorded on the device's stream, or seconds."""


@dataclass(frozen=True)
class SentBytes:
    """What this rank sends to others in one attention, bytes.

    to_owners: its queries, keys and values;  ring: slots handed on;  to_homes: outputs
    usp:       what it would send as part of plain USP: equal shards, whole heads, the same strategy
    """

    to_owners: int
    ring: int
    to_homes: int
    usp: int

    @classmethod
    def of(cls, executor: AttentionExecutor, shape: AttentionShape, shard: int) -> SentBytes:
        """Counted from the split sizes and slots that the executor passes to its collectives. shard: tokens at home"""
        strategy = executor.plan.strategy
        dispatched, combined = executor.route.tokens_sent(executor.group.rank)
        handed_on = sum(len(table.kv_len) for table in executor.tables[:-1])
        x, y = strategy.ulysses, strategy.ring
        tensor = shape.heads * shard * shape.token_bytes  # one of q, k, v or the output, at home
        return cls(
            to_owners=dispatched * shape.token_bytes,
            ring=handed_on * 2 * executor.plan.grid.block_k * shape.token_bytes,
            to_homes=combined * shape.token_bytes,
            usp=4 * tensor * (x - 1) // x + 2 * tensor * (y - 1),
        )


@dataclass(slots=True)
class ObservedCall:
    """One attention.

    forward:   which forward pass it was in, counted from the observer's start
    replanned: whether it was the first to use its plan;  plan_ms: then the time of making it
    work, work_before: int64[P], dense blocks of each rank under the plan in use, and under the contiguous one
    The other numbers are those of `Plan`, for this attention's own mask as soon as that is counted.
    """

    layer: int
    forward: int
    strategy: str
    replanned: bool
    plan_ms: float
    sent: SentBytes
    started: Mark
    ended: Mark
    density: float = 0.0
    rho_before: float = 1.0
    rho: float = 1.0
    rho_bound: float = 1.0
    moved: float = 0.0
    work: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    work_before: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))

    def evaluate(self, plan: Plan) -> None:
        """Takes the numbers of a plan."""
        self.density, self.moved = plan.density, plan.moved
        self.rho_before, self.rho, self.rho_bound = plan.rho_before, plan.rho, plan.rho_bound
        self.work, self.work_before = (one.sum(axis=0) for one in plan.metrics.compared)

    @property
    def seconds(self) -> float:
        """Between its marks. Waits for the device where they are events."""
        if isinstance(self.started, float) or isinstance(self.ended, float):
            return float(self.ended) - float(self.started)  # type: ignore[arg-type]
        self.ended.synchronize()
        return self.started.elapsed_time(self.ended) / 1e3


@dataclass
class RunObserver(SessionObserver):
    """Collects what a report tells of one session.

    folder:   where the report goes
    calls:    of the run so far, oldest first
    seconds:  of the last pipeline call, where a pipeline is watched;  latents: what its scheduler returned last
    postponed: whether somebody else writes the report, when several pipeline calls are over
    kernel, device, dtype: of the last attention
    """

    compares = True

    folder: str
    calls: deque[ObservedCall] = field(default_factory=lambda: deque(maxlen=MOST_CALLS))
    seconds: float | None = None
    latents: torch.Tensor | None = None
    postponed: bool = False
    kernel: str = ""
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    dtype: str = ""
    _started: Mark = 0.0
    _timesteps: list[torch.Tensor | float | None] = field(default_factory=list)
    _passes: list[tuple[int | None, int | None]] = field(default_factory=list)
    """By forward pass, its guidance pass and the index of its step, where the host says them."""
    _assignments: dict[Hashable, Assignment] = field(default_factory=dict)
    _open: dict[Hashable, ObservedCall] = field(default_factory=dict)

    def restart(self) -> None:
        """Forgets the run so far; plans that were made in it still count as made."""
        self.calls.clear()
        self._timesteps.clear()
        self._passes.clear()
        self._open.clear()
        self.seconds = self.latents = None

    def begin(
        self, step: DenoisingStep, timestep: torch.Tensor | float | None, cfg_branch: int | None, index: int | None
    ) -> None:
        """Copies the timestep on its device, to be read when the run is over."""
        if isinstance(timestep, torch.Tensor):
            timestep = timestep.detach().reshape(-1)[:1].clone()
        self._timesteps.append(timestep)
        self._passes.append((cfg_branch, index))

    def attention_begins(self, device: torch.device) -> None:
        self._started = _mark(device)

    def attention_ends(
        self,
        layer: int,
        key: Hashable,
        executor: AttentionExecutor,
        q: torch.Tensor,
        latest: Mapping[Hashable, Plan],
        asynchronous: bool,
    ) -> None:
        plan = executor.plan
        self._evaluate(key, latest)
        replanned = self._assignments.get(key) is not plan.assignment
        self._assignments[key] = plan.assignment
        self.device, self.dtype = q.device, str(q.dtype).removeprefix("torch.")
        self.kernel = self.kernel or executor.kernels.kernel_for(q).name
        call = ObservedCall(
            layer=layer,
            forward=max(len(self._timesteps) - 1, 0),
            strategy=str(plan.strategy),
            replanned=replanned,
            plan_ms=plan.plan_ms if replanned else 0.0,
            sent=_sent_by(executor, q),
            started=self._started,
            ended=_mark(q.device),
        )
        call.evaluate(plan)
        if asynchronous:
            self._open[key] = call
        self.calls.append(call)

    def flush(self, latest: Mapping[Hashable, Plan]) -> None:
        """Gives calls the numbers of their own masks."""
        for key in list(self._open):
            self._evaluate(key, latest)

    def moments(self) -> list[DenoisingStep]:
        """Step and cfg_branch of each forward pass. Waits for the device once."""
        counter, found = StepCounter(), []
        tensors = [t for t in self._timesteps if isinstance(t, torch.Tensor)]
        read = iter(torch.cat([t.to(tensors[0]) for t in tensors]).tolist() if tensors else ())
        for number, (timestep, of_host) in enumerate(zip(self._timesteps, self._passes, strict=True)):
            if timestep is None:  # nothing tells steps apart but their order
                found.append(DenoisingStep(number))
            else:
                value = next(read) if isinstance(timestep, torch.Tensor) else timestep
                found.append(counter.advance(float(value), *of_host))
        return found

    def _evaluate(self, key: Hashable, latest: Mapping[Hashable, Plan]) -> None:
        counted = latest.get(key)
        if counted is not None and key in self._open:
            self._open.pop(key).evaluate(counted)


def _sent_by(executor: AttentionExecutor, q: torch.Tensor) -> SentBytes:
    shape = AttentionShape.of(q, executor.plan.heads, executor.plan.grid.tokens)
    return SentBytes.of(executor, shape, q.shape[2])


def _mark(device: torch.device) -> Mark:
    """Now."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def run_observer(session: AttentionSession) -> RunObserver | None:
    """The session's, where a report is wanted."""
    return next((one for one in session.observers if isinstance(one, RunObserver)), None)
