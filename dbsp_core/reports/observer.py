"""Creates sessions with the observers that the settings ask for: mask recording and run report."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from dbsp_core.comm.block_pooling import mean_bytes
from dbsp_core.comm.consistency import gather_texts
from dbsp_core.comm.groups import SequenceGroup
from dbsp_core.config import DbspConfig
from dbsp_core.cost.prediction import AttentionShape
from dbsp_core.layout.strategy import Strategy
from dbsp_core.masks.steps import DenoisingStep, Progress, StepClock
from dbsp_core.planning.reuse import PlanUse
from dbsp_core.reports.mask_recorder import MaskRecorder
from dbsp_core.reports.run_report import RunReport
from dbsp_core.runtime.prepared import PreparedAttention
from dbsp_core.runtime.session import AttentionSession
from dbsp_core.runtime.session_observer import SessionObserver
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
    """Creates an `AttentionSession` with observers. Collective: if one rank wants a report, all ranks take part.

    Without `check` it is not collective; the caller calls `check_settings` and `observe_run` later.
    """
    recorder = MaskRecorder.from_environment(config.record, group, layers)
    observers: list[SessionObserver] = [recorder] if recorder.counts_steps else []
    clock = clock or StepClock()
    session = AttentionSession(config, group, strategy, heads, layers, steps, clock, observers, check=check)
    if check:
        observe_run([session])
    return session


def observe_run(sessions: Sequence[AttentionSession]) -> None:
    """Adds one shared observer to sessions that take turns, if any rank wants a report. Collective in that case.

    Layer numbers continue from one session to the next.
    """
    if not sessions[0].report:
        return
    group, folder = sessions[0].group, sessions[0].config.report or ""
    group.auxiliary(REPORTS)  # its first call is collective: make it before a rank can fail
    folders = [folder] if group.alone else gather_texts(group.control(), folder)
    observer, layers = RunObserver(next(filter(None, folders), "")), 0  # "": only another half wants a report
    for session in sessions:
        session.observers.append(observer)
        session.first_layer = layers
        layers += session.layers


REPORTS = "reports"  # purpose of an auxiliary group: a rank that misses a report must not disturb attention
MOST_CALLS = 200_000  # number of attentions kept, the latest: 50 generations of 50 steps, 40 layers and 2 CFG passes

Timestamp = torch.cuda.Event | float  # A point in time: an event on the device's stream, or seconds


def bytes_sent(prepared: PreparedAttention, q: torch.Tensor) -> tuple[int, int, int, int]:
    """Counts the bytes that this rank sends to other ranks in an attention of q [B, H, n_local, D].

    In order: queries with the first chunk's keys and values (and the sums for the mean that int8 keys lack); later
    chunks' keys and values; outputs; and plain USP: equal shards, whole heads, same strategy.
    """
    plan = prepared.plan
    x, y = plan.strategy.ulysses, plan.strategy.ring
    shape, comm_dtype = AttentionShape.from_q(q, plan.heads), plan.comm_dtype
    token_bytes, sent_bytes = shape.token_bytes, shape.sent_bytes(comm_dtype)
    means = mean_bytes(shape.batch, shape.heads, shape.head_dim, x * y) if comm_dtype.is_int8 else 0
    dispatched, fetched, combined = prepared.route.tokens_sent(prepared.group.rank)
    tensor = plan.heads * q.shape[2] * token_bytes  # local q, k, v or output
    usp = 4 * tensor * (x - 1) // x + 2 * tensor * (y - 1)
    return dispatched * sent_bytes + means, fetched * sent_bytes, combined * shape.out_bytes(comm_dtype), usp


NUMBERS = ("density", "rho_before", "rho", "rho_bound")  # fields of a call's `Plan` in reports


@dataclass(slots=True)
class ObservedCall:
    """Record of one attention."""

    layer: int
    forward: int  # index of its forward pass since the observer's start
    strategy: str
    replanned: bool  # True for the first call with its plan
    plan_ms: float  # milliseconds of planning for the first call with its plan, otherwise 0
    sent: tuple[int, int, int, int]  # see `bytes_sent`
    started: Timestamp
    ended: Timestamp
    use: PlanUse | None  # its plan, until the call's mask is counted
    batch: int = 1  # items that share the plan
    slots: int = 0  # rows that the GPU computes at a time; 0: unknown
    row_share: float = 0.0  # see `Plan.row_share`
    numbers: Mapping[str, float] = field(default_factory=lambda: dict.fromkeys(NUMBERS, 1.0))
    work: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))  # int64[P], active blocks of each rank
    work_before: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))  # under the contiguous plan

    def read_counts(self) -> bool:
        """Copies the plan's numbers once the session has counted the mask; returns False before that."""
        plan = None if self.use is None else self.use.counted
        if plan is None:
            return False
        self.numbers, self.use = {name: getattr(plan, name) for name in NUMBERS}, None
        self.work, self.work_before = plan.compared
        self.row_share = plan.row_share(self.slots) / self.batch
        return True


def seconds_between(start: Timestamp, end: Timestamp) -> float:
    """Returns the seconds between two timestamps. Waits for the device if they are events."""
    if isinstance(start, float) or isinstance(end, float):
        return float(end) - float(start)  # type: ignore[arg-type]
    end.synchronize()
    return start.elapsed_time(end) / 1e3


@dataclass
class RunObserver(SessionObserver):
    """Collects the data of a run's report."""

    compares = True

    folder: str  # of the report
    calls: deque[ObservedCall] = field(default_factory=lambda: deque(maxlen=MOST_CALLS))  # oldest first
    seconds: float | None = None  # time of the last pipeline call, if there is a pipeline
    latents: torch.Tensor | None = None  # last output of the pipeline's scheduler
    report: RunReport | None = None  # of the last run, on the rank that wrote it
    skipped: dict[int, tuple[int, int]] = field(default_factory=dict)
    """By first layer of each session with a step cache: attentions skipped, and all attentions."""
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    dtype: str = ""
    _kernels: dict[str, None] = field(default_factory=dict)  # names of kernels that ran, in order
    _started: Timestamp = 0.0
    _passes: list[tuple[torch.Tensor | float | None, int | None, int | None]] = field(default_factory=list)
    """Timestep, CFG pass and index of the step of each forward pass, as far as the framework knows them."""
    _open: list[ObservedCall] = field(default_factory=list)  # calls whose masks have not been counted yet

    @property
    def kernel(self) -> str:
        """The kernels that ran, such as "triton" or "torch flash (dense heads), triton"."""
        return ", ".join(self._kernels)

    def restart(self) -> None:
        """Clears the records of the run so far; its plans are not counted again."""
        self.calls.clear()
        self.skipped.clear()
        self._passes.clear()
        self._open.clear()
        self.seconds = self.latents = self.report = None

    def begin(
        self, step: DenoisingStep, timestep: torch.Tensor | float | None, cfg_branch: int | None, index: int | None
    ) -> None:
        """Copies the timestep on its device; the copy is read after the run."""
        if isinstance(timestep, torch.Tensor):
            timestep = timestep.detach().reshape(-1)[:1].clone()
        self._passes.append((timestep, cfg_branch, index))

    def attention_begins(self, device: torch.device) -> None:
        self._started = _timestamp(device)

    def attention_ends(self, layer: int, prepared: PreparedAttention, q: torch.Tensor, use: PlanUse) -> None:
        self.read_counts()
        self.device, self.dtype = q.device, str(q.dtype).removeprefix("torch.")
        fused, grid, kernel = fused_kernel(q), prepared.plan.grid, next(reversed(prepared.kernels.values()))
        for of_chunk in prepared.tables.dense:
            dense = of_chunk if fused else None
            names = [] if dense is None else [f"torch {fused} (dense heads)"]
            names += [] if dense is not None and dense.every else [prepared.kernel_name]
            self._kernels |= dict.fromkeys(names)
        call = ObservedCall(
            layer=layer,
            forward=max(len(self._passes) - 1, 0),
            strategy=str(use.plan.strategy),
            replanned=use.new,
            plan_ms=use.plan.plan_ms if use.new else 0.0,
            sent=bytes_sent(prepared, q),
            started=self._started,
            ended=_timestamp(q.device),
            use=use,
            batch=len(q) if len(prepared.plan.owner) == q.shape[1] else 1,
            slots=(kernel.slots and kernel.slots(q, (grid.block_q, grid.block_k))) or 0,
        )
        self.calls.append(call)
        self._open.append(call)

    def pass_ends(self, first_layer: int, skipped: int, attentions: int) -> None:
        before, all_before = self.skipped.get(first_layer, (0, 0))
        self.skipped[first_layer] = before + skipped, all_before + attentions

    def read_counts(self) -> None:
        """Copies the plans' numbers to calls whose masks have been counted by now."""
        self._open = [call for call in self._open if not call.read_counts()]

    def moments(self) -> list[DenoisingStep]:
        """Returns the step and CFG pass of each forward pass. Waits for the device once."""
        steps: list[DenoisingStep] = []
        tensors = [timestep for timestep, _, _ in self._passes if isinstance(timestep, torch.Tensor)]
        values = iter(torch.cat([t.to(tensors[0]) for t in tensors]).tolist() if tensors else ())
        clock = StepClock(lambda: Progress(step_index=self._passes[len(steps)][2]))
        for number, (timestep, cfg_branch, _) in enumerate(self._passes):
            if timestep is None:  # only the order of passes is known
                steps.append(DenoisingStep(number))
            else:
                value = next(values) if isinstance(timestep, torch.Tensor) else timestep
                steps.append(clock.advance(float(value), cfg_branch))
        return steps


def _timestamp(device: torch.device) -> Timestamp:
    """Returns the current time, on CUDA as an event on the current stream."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def run_observer(session: AttentionSession) -> RunObserver | None:
    """Returns the session's `RunObserver`, or None without a report."""
    return next((observer for observer in session.observers if isinstance(observer, RunObserver)), None)
