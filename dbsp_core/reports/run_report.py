"""A run's report as data: the content of report.json, and the numbers on its page and in tables."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from dbsp_core.utils.errors import UserError
from dbsp_core.utils.files import read_text, require_file, user_path, write_atomically

FORMAT = "db-SP report 5"


@dataclass(frozen=True)
class Environment:
    """Settings, software and hardware of a run."""

    settings: Mapping[str, Any]  # Settings in effect as in YAML, with "auto" and defaults resolved
    software: Mapping[str, str]  # Versions by name
    hardware: Sequence[str]  # The device of each rank
    kernel: str
    dtype: str
    date: str = ""  # End of the run in ISO 8601, to the minute, in rank 0's time zone

    @property
    def on_cpu(self) -> bool:
        """True if attention ran on CPUs, whose times say nothing about GPUs."""
        return self.kernel == "cpu"


@dataclass(frozen=True)
class CallColumns:
    """All attentions of the run in order, as columns of equal length."""

    layer: Sequence[int]
    step: Sequence[int]
    branch: Sequence[int]  # The CFG pass
    strategy: Sequence[str]
    replanned: Sequence[int]  # 1 for the first call with a plan, otherwise 0
    plan_ms: Sequence[float]  # Planning time on rank 0; 0 for a reused plan
    density: Sequence[float]
    rho_before: Sequence[float]
    rho: Sequence[float]
    rho_bound: Sequence[float]  # Lower bound of ρ_s for plans of this granularity
    row_share: Sequence[float]  # Longest row over a slot's share, on the worst rank; see `Plan.row_share`
    slots: Sequence[int]  # Rows that a rank's GPU computes at a time; 0: unknown
    seconds: Sequence[float]  # From the mask to the output, on the slowest rank; `seconds_mean` is the mean over ranks
    seconds_mean: Sequence[float]
    bytes_to_owners: Sequence[int]  # Sent by all ranks to other ranks, like bytes_chunks and bytes_to_sources
    bytes_chunks: Sequence[int]
    bytes_to_sources: Sequence[int]
    bytes_usp: Sequence[int]  # Bytes that all ranks would send in plain USP

    def __post_init__(self) -> None:
        lengths = {len(getattr(self, f.name)) for f in fields(self)}
        if len(lengths) > 1:
            raise ValueError(f"its columns have different lengths, {sorted(lengths)}")

    def __len__(self) -> int:
        return len(self.layer)


@dataclass(frozen=True)
class RankTotals:
    """Sums over the run, by rank."""

    attention_s: Sequence[float]  # Seconds in attention
    bytes_sent: Sequence[int]  # To other ranks in attention
    work: Mapping[str, Sequence[int]]  # Active blocks of each rank under db-SP's plans, by layer
    work_before: Mapping[str, Sequence[int]]  # The same under contiguous plans

    def __post_init__(self) -> None:
        by_rank = (self.attention_s, self.bytes_sent, *self.work.values(), *self.work_before.values())
        if len(set(map(len, by_rank))) > 1:
            raise ValueError("its sums by rank have different numbers of ranks")


@dataclass(frozen=True)
class Totals:
    """Sums and means of the columns, for a run or one layer."""

    calls: int  # number of attentions
    replans: int  # number of plans made
    steps: int  # number of denoising steps
    density: float
    rho_before: float  # mean over attentions of contiguous plans' ρ_s
    rho: float  # mean for the plans in use
    rho_best: float  # mean of the bounds
    rho_worst: float  # maximum for the plans in use
    row_share: float  # mean of the longest rows over a slot's share; 0 if no call has slots
    row_share_worst: float  # maximum
    slots: int  # maximum
    attention_s: float  # seconds in attention, on the slowest rank of each call
    attention_mean_s: float  # the same, mean over ranks
    attention_share: float  # share of attention_s in the run's seconds
    plan_s: float  # seconds of planning
    bytes_to_owners: int  # sent by all ranks, like the other byte counts
    bytes_chunks: int
    bytes_to_sources: int
    bytes_sent: int
    bytes_usp: int
    saved_s: float  # extra seconds of contiguous plans if time were proportional to the slowest rank's blocks
    left_s: float  # seconds that perfect balance would save, under the same assumption
    strategies: Mapping[str, int] = field(default_factory=dict)  # number of attentions by strategy

    @classmethod
    def from_calls(cls, calls: CallColumns, seconds: float) -> Totals:
        """Returns the totals of a run that took `seconds`."""
        time, rho, before = (np.array(column) for column in (calls.seconds, calls.rho, calls.rho_before))
        kinds = [sum(column) for column in (calls.bytes_to_owners, calls.bytes_chunks, calls.bytes_to_sources)]
        return cls(
            calls=len(calls),
            replans=sum(calls.replanned),
            steps=len(set(calls.step)),
            density=_mean(calls.density),
            rho_before=_mean(calls.rho_before),
            rho=_mean(calls.rho),
            rho_best=_mean(calls.rho_bound),
            rho_worst=max(calls.rho, default=1.0),
            row_share=_mean(calls.row_share),
            row_share_worst=max(calls.row_share, default=0.0),
            slots=max(calls.slots, default=0),
            attention_s=float(time.sum()),
            attention_mean_s=float(sum(calls.seconds_mean)),
            attention_share=float(time.sum()) / seconds if seconds else 0.0,
            plan_s=float(sum(calls.plan_ms)) / 1e3,
            bytes_to_owners=kinds[0],
            bytes_chunks=kinds[1],
            bytes_to_sources=kinds[2],
            bytes_sent=sum(kinds),
            bytes_usp=sum(calls.bytes_usp),
            saved_s=float((time * (before / rho - 1)).sum()),
            left_s=float((time * (1 - 1 / rho)).sum()),
            strategies=dict(sorted(Counter(calls.strategy).items())),
        )


@dataclass(frozen=True)
class RunReport:
    """The report of one run.

    `seconds` is the wall time of the pipeline's call on rank 0, including compilation; without a pipeline, the time
    from the start of the transformer's first attention to the end of its last.
    """

    model: str
    framework: str
    world_size: int
    strategy: str
    planner: str
    max_abs_diff: float | None  # of the final latents from a single process's; None: not compared
    seconds: float
    environment: Environment
    calls: CallColumns
    ranks: RankTotals
    skipped: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """By transformer with a step cache: attentions skipped, and all attentions."""
    quantized: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """By transformer: quantized linear layers, and bytes of their weights before and after."""
    compile_s: float = 0.0  # Seconds that torch.compile reported on rank 0, part of `seconds`
    video: str = ""  # File name of the video in the report's folder

    @cached_property
    def totals(self) -> Totals:
        return Totals.from_calls(self.calls, self.seconds)

    @classmethod
    def read(cls, path: Path) -> RunReport:
        """Reads a report.json, or the one in a folder. Raises UserError if it is not a report."""
        path = user_path(path)
        path = path / "report.json" if os.path.isdir(path) else path
        advice = "give the report folder of a run, which its setting `report` names"
        require_file(path, "report", advice)
        try:
            values = json.loads(read_text(path))
            if not isinstance(values, dict) or values.pop("format", None) != FORMAT:
                raise ValueError(f"expected format {FORMAT!r}")
            values.pop("totals", None)  # computed from the columns
            parts = {"environment": Environment, "calls": CallColumns, "ranks": RankTotals}
            report = cls(**values | {name: part(**values[name]) for name, part in parts.items()})
            report.totals  # noqa: B018  raises for columns of other types
            return report
        except (OSError, LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError) as error:
            raise UserError(f"{path} is not a db-SP report ({error}); {advice}") from error

    def layers(self) -> dict[int, Totals]:
        columns, totals = vars(self.calls), {}
        for layer in sorted(set(self.calls.layer)):
            indices = [index for index, of_call in enumerate(self.calls.layer) if of_call == layer]
            of_layer = {name: [column[index] for index in indices] for name, column in columns.items()}
            totals[layer] = Totals.from_calls(CallColumns(**of_layer), self.seconds)
        return totals

    def write(self, path: Path) -> None:
        """Writes the report atomically, with `totals` for other programs."""
        content = {"format": FORMAT, **asdict(self), "totals": asdict(self.totals)}
        write_atomically(path, json.dumps(content, allow_nan=False) + "\n")


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if len(values) else 0.0
