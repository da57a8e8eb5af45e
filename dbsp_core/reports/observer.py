"""Makes sessions with the observers that a configuration asks for: a recording of masks, a report of the run."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from dbsp_core.comm.consistency import gather_texts
from dbsp_core.comm.exchange import mean_bytes
from dbsp_core.comm.groups import SequenceGroup
from dbsp_core.config import DbspConfig
from dbsp_core.cost.prediction import AttentionShape
from dbsp_core.layout.strategy import Strategy
from dbsp_core.masks.steps import DenoisingStep, Progress, StepClock
from dbsp_core.reports.mask_recorder import MaskRecorder
from dbsp_core.reports.run_report import RunReport
from dbsp_core.runtime.plan_keeper import PlanUse
from dbsp_core.runtime.prepared import PreparedAttention
from dbsp_core.runtime.session import AttentionSession
from dbsp_core.runtime.session_state import SessionObserver
from dbsp_kernels import fused_kernel


def observed_session(
    config: DbspConfig,
    group: SequenceGroup,
    strategy: Strategy | None,
    heads: int,
    layers: int,
    steps: Callable[[], int | None] = lambda: None,
    clock: StepClock | None = None,
    check: bool = True,
) -> AttentionSession:
    """Creates an `AttentionSession` with observers. Collective: if one rank wants a report, all take part in it.

    Args:
        check: False if the caller calls `check_settings` and `observe_run` later; it is not collective then.
    """
    recorder = MaskRecorder.from_environment(config.record, group, layers)
    observers: list[SessionObserver] = [recorder] if recorder.counts_steps else []
    session = AttentionSession(
        config, group, strategy, heads, layers, steps, clock or StepClock(), observers, check=check
    )
    if check:
        observe_run([session])
    return session


def observe_run(sessions: Sequence[AttentionSession]) -> None:
    """Adds one observer of the run to sessions that take turns, if any rank wants a report. Collective then.

    Layers are numbered on from one session to the next.
    """
    if not sessions[0].report:
        return
    group, folder = sessions[0].group, sessions[0].config.report or ""
    group.auxiliary(REPORTS)  # collective at the first call: now, before a rank can have failed
    folders = [folder] if group.alone else gather_texts(group.control(), folder)
    observer, layers = RunObserver(next(filter(None, folders), "")), 0  # "": the report is wanted in another half
    for session in sessions:
        session.observers.append(observer)
        session.first_layer = layers
        layers += session.layers


REPORTS = "reports"
"""Purpose of the auxiliary group for reports: a rank that misses a report disturbs no attention."""
MOST_CALLS = 200_000
"""Number of latest attentions that are kept: 50 generations of 50 steps, 40 layers and 2 CFG passes."""

Timestamp = torch.cuda.Event | float
"""A point in time: an event on the device's stream, or seconds."""


@dataclass(frozen=True)
class BytesByStage:
    """Bytes that this rank sends to other ranks in each stage of one attention.

    Attributes:
        dispatch: Queries, with the keys and values of the first chunk, and sums for the mean of keys that are sent
            less it.
        chunks: Keys and values of later chunks.
        combine: Outputs.
        usp: Bytes that plain USP would send in all stages: equal shards, whole heads, the same strategy.
    """

    dispatch: int
    chunks: int
    combine: int
    usp: int

    @classmethod
    def from_attention(cls, prepared: PreparedAttention, q: torch.Tensor) -> BytesByStage:
        """Counts what an attention passes to its collectives for q [B, H, n_local, D]."""
        plan = prepared.plan
        x, y = plan.strategy.ulysses, plan.strategy.ring
        shape, comm_dtype = AttentionShape.from_q(q, plan.heads), plan.comm_dtype
        token_bytes, sent_bytes = shape.token_bytes, shape.sent_bytes(comm_dtype)
        means = mean_bytes(shape.batch, shape.heads, shape.head_dim, x * y) if comm_dtype.centred else 0
        dispatched, fetched, combined = prepared.route.tokens_sent(prepared.group.rank)
        tensor = plan.heads * q.shape[2] * token_bytes  # one of local q, k, v or output
        return cls(
            dispatch=dispatched * sent_bytes + means,
            chunks=fetched * sent_bytes,
            combine=combined * token_bytes,
            usp=4 * tensor * (x - 1) // x + 2 * tensor * (y - 1),
        )


@dataclass(slots=True)
class ObservedCall:
    """One attention. Numbers without a description are those of `Plan`, for the call's own mask.

    Attributes:
        forward: Number of its forward pass since the observer's start.
        replanned: True if it was the first to use its plan.
        plan_ms: Milliseconds of planning if it was the first, otherwise 0.
        use: Its plan, until the call's own mask is counted.
        work: int64[P], active blocks of each rank under the plan in use.
        work_before: int64[P], the same under the contiguous plan.
    """

    layer: int
    forward: int
    strategy: str
    replanned: bool
    plan_ms: float
    sent: BytesByStage
    started: Timestamp
    ended: Timestamp
    use: PlanUse | None
    density: float = 0.0
    rho_before: float = 1.0
    rho: float = 1.0
    rho_bound: float = 1.0
    work: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    work_before: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))

    def read_counts(self) -> bool:
        """Takes over the plan's numbers once the session has counted the mask. Returns False before that."""
        plan = None if self.use is None else self.use.counted
        if plan is None:
            return False
        self.density, self.use = plan.density, None
        self.rho_before, self.rho, self.rho_bound = plan.rho_before, plan.rho, plan.rho_bound
        self.work, self.work_before = plan.compared
        return True

    @property
    def seconds(self) -> float:
        """Time between its timestamps. Waits for the device if they are events."""
        if isinstance(self.started, float) or isinstance(self.ended, float):
            return float(self.ended) - float(self.started)  # type: ignore[arg-type]
        self.ended.synchronize()
        return self.started.elapsed_time(self.ended) / 1e3


@dataclass
class RunObserver(SessionObserver):
    """Collects the report of one session.

    Attributes:
        folder: Folder of the report.
        calls: Attentions of the run so far, oldest first.
        seconds: Time of the last pipeline call, if there is a pipeline.
        latents: The last result of the pipeline's scheduler.
        report: The report of the last run, on the rank that has written it.
    """

    compares = True

    folder: str
    calls: deque[ObservedCall] = field(default_factory=lambda: deque(maxlen=MOST_CALLS))
    seconds: float | None = None
    latents: torch.Tensor | None = None
    report: RunReport | None = None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    dtype: str = ""
    _kernels: dict[str, None] = field(default_factory=dict)
    """Names of the kernels that ran, in order of their first run."""
    _started: Timestamp = 0.0
    _timesteps: list[torch.Tensor | float | None] = field(default_factory=list)
    _passes: list[tuple[int | None, int | None]] = field(default_factory=list)
    """CFG pass and index of the step of each forward pass, if the framework knows them."""
    _open: list[ObservedCall] = field(default_factory=list)
    """Calls whose masks have not been counted yet."""

    @property
    def kernel(self) -> str:
        """The kernels that ran, such as "triton" or "torch flash (dense heads), triton"."""
        return ", ".join(self._kernels)

    def restart(self) -> None:
        """Forgets the run so far; plans that were made in it are not counted again."""
        self.calls.clear()
        self._timesteps.clear()
        self._passes.clear()
        self._open.clear()
        self.seconds = self.latents = self.report = None

    def begin(
        self, step: DenoisingStep, timestep: torch.Tensor | float | None, cfg_branch: int | None, index: int | None
    ) -> None:
        """Copies the timestep on its device; it is read when the run is over."""
        if isinstance(timestep, torch.Tensor):
            timestep = timestep.detach().reshape(-1)[:1].clone()
        self._timesteps.append(timestep)
        self._passes.append((cfg_branch, index))

    def attention_begins(self, device: torch.device) -> None:
        self._started = _timestamp(device)

    def attention_ends(self, layer: int, prepared: PreparedAttention, q: torch.Tensor, use: PlanUse) -> None:
        self.read_counts()
        self.device, self.dtype = q.device, str(q.dtype).removeprefix("torch.")
        self._kernels |= dict.fromkeys(_kernels_of(prepared, q))
        call = ObservedCall(
            layer=layer,
            forward=max(len(self._timesteps) - 1, 0),
            strategy=str(use.plan.strategy),
            replanned=use.new,
            plan_ms=use.plan.plan_ms if use.new else 0.0,
            sent=BytesByStage.from_attention(prepared, q),
            started=self._started,
            ended=_timestamp(q.device),
            use=use,
        )
        self.calls.append(call)
        self._open.append(call)

    def read_counts(self) -> None:
        """Takes over the numbers of calls whose masks have been counted since."""
        self._open = [call for call in self._open if not call.read_counts()]

    def moments(self) -> list[DenoisingStep]:
        """Returns the step and CFG pass of each forward pass. Waits for the device once."""
        clock, moments = StepClock(lambda: Progress(step_index=now[1])), []
        tensors = [t for t in self._timesteps if isinstance(t, torch.Tensor)]
        read = iter(torch.cat([t.to(tensors[0]) for t in tensors]).tolist() if tensors else ())
        for number, (timestep, now) in enumerate(zip(self._timesteps, self._passes, strict=True)):
            if timestep is None:  # only their order is known
                moments.append(DenoisingStep(number))
            else:
                value = next(read) if isinstance(timestep, torch.Tensor) else timestep
                moments.append(clock.advance(float(value), now[0]))
        return moments


def _timestamp(device: torch.device) -> Timestamp:
    """Returns the present point in time."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def run_observer(session: AttentionSession) -> RunObserver | None:
    """Returns the session's observer, if a report is wanted."""
    return next((observer for observer in session.observers if isinstance(observer, RunObserver)), None)


def _kernels_of(prepared: PreparedAttention, q: torch.Tensor) -> list[str]:
    """Returns the names of the kernels that an attention of q [B, H, n, D] ran on."""
    fused, names = fused_kernel(q), []
    for table in prepared.tables:
        dense = table.dense if fused else None
        names += [] if dense is None else [f"torch {fused} (dense heads)"]
        names += [] if dense is not None and dense.every else [prepared.kernel_name]
    return names
