"""What happened in a run, as data: report.json, and the numbers that its page and tables show."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn, cast, get_args, get_origin, get_type_hints

import numpy as np

from dbsp_core.utils.atomic_io import write_atomically
from dbsp_core.utils.errors import UserError

__all__ = ["FORMAT", "CallColumns", "Environment", "LayerReport", "RankTotals", "RunReport", "Totals"]

FORMAT = "db-SP report 2"


@dataclass(frozen=True)
class LayerReport:
    """One layer's numbers at its last attention; see `dbsp_core.Plan`."""

    layer: int
    density: float
    rho_before: float
    rho: float
    rho_bound: float
    moved: float


@dataclass(frozen=True)
class Environment:
    """What the run ran with.

    settings: of `DbspConfig` in effect, as they would stand in YAML, with what "auto" and defaults came to
    software: versions by name;  hardware: the device of each rank
    """

    settings: Mapping[str, Any]
    software: Mapping[str, str]
    hardware: Sequence[str]
    kernel: str
    dtype: str


@dataclass(frozen=True)
class CallColumns:
    """Every attention of the run, in the order in which they came: columns of one length.

    step, branch: of the denoising, and of the step's guidance passes
    strategy:     "UxRy"
    replanned:    1 where a plan was used for the first time;  plan_ms: then the time of making it, on rank 0
    rho_bound:    ρ_s that no plan of this granularity can beat
    seconds, seconds_mean: of the slowest rank, and mean over ranks; mask, plan, exchange, kernels and way home
    bytes_to_owners, bytes_ring, bytes_to_homes: sent to other ranks, sum over ranks
    bytes_busiest: all three, of the rank that sends most;  bytes_usp: of all ranks, had it been plain USP
    """

    layer: Sequence[int]
    step: Sequence[int]
    branch: Sequence[int]
    strategy: Sequence[str]
    replanned: Sequence[int]
    plan_ms: Sequence[float]
    density: Sequence[float]
    rho_before: Sequence[float]
    rho: Sequence[float]
    rho_bound: Sequence[float]
    seconds: Sequence[float]
    seconds_mean: Sequence[float]
    bytes_to_owners: Sequence[int]
    bytes_ring: Sequence[int]
    bytes_to_homes: Sequence[int]
    bytes_busiest: Sequence[int]
    bytes_usp: Sequence[int]

    def __post_init__(self) -> None:
        lengths = {len(getattr(self, f.name)) for f in fields(self)}
        if len(lengths) > 1:
            raise ValueError(f"its columns have different lengths, {sorted(lengths)}")

    def __len__(self) -> int:
        return len(self.layer)


@dataclass(frozen=True)
class RankTotals:
    """Sums over the run, by rank.

    attention_s: seconds in attention;  bytes_sent: to other ranks in attention
    work, work_before: by layer, dense blocks of each rank under db-SP's plans, and under contiguous ones
    """

    attention_s: Sequence[float]
    bytes_sent: Sequence[int]
    work: Mapping[str, Sequence[int]]
    work_before: Mapping[str, Sequence[int]]

    def __post_init__(self) -> None:
        by_rank = (self.attention_s, self.bytes_sent, *self.work.values(), *self.work_before.values())
        if len(set(map(len, by_rank))) > 1:
            raise ValueError("its sums by rank are of different numbers of ranks")


@dataclass(frozen=True)
class Totals:
    """What the columns come to.

    calls, replans, steps: numbers of attentions, of plans made, of denoising steps
    rho_before, rho, rho_best: means over attentions: contiguous, used, and the least possible;  rho_worst: of used
    attention_s:      seconds in attention of the slowest rank at each;  attention_mean_s: mean over ranks
    attention_share:  of `seconds`
    plan_s:           making plans
    bytes_*:          sent by all ranks
    saved_s, left_s:  modelled from ρ_s: seconds that contiguous plans would have taken more, and that perfectly even
                      work would have taken less, if attention took time in proportion to its slowest rank's blocks
    strategies:       how many attentions each was used in
    """

    calls: int
    replans: int
    steps: int
    density: float
    rho_before: float
    rho: float
    rho_best: float
    rho_worst: float
    attention_s: float
    attention_mean_s: float
    attention_share: float
    plan_s: float
    bytes_to_owners: int
    bytes_ring: int
    bytes_to_homes: int
    bytes_sent: int
    bytes_usp: int
    saved_s: float
    left_s: float
    strategies: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, calls: CallColumns, seconds: float) -> Totals:
        """seconds: of the whole run"""
        time, rho, before = (np.array(column) for column in (calls.seconds, calls.rho, calls.rho_before))
        kinds = [sum(column) for column in (calls.bytes_to_owners, calls.bytes_ring, calls.bytes_to_homes)]
        attention_s = float(time.sum())
        return cls(
            calls=len(calls),
            replans=sum(calls.replanned),
            steps=len(set(calls.step)),
            density=_mean(calls.density),
            rho_before=_mean(calls.rho_before),
            rho=_mean(calls.rho),
            rho_best=_mean(calls.rho_bound),
            rho_worst=max(calls.rho, default=1.0),
            attention_s=attention_s,
            attention_mean_s=float(sum(calls.seconds_mean)),
            attention_share=attention_s / seconds if seconds else 0.0,
            plan_s=float(sum(calls.plan_ms)) / 1e3,
            bytes_to_owners=kinds[0],
            bytes_ring=kinds[1],
            bytes_to_homes=kinds[2],
            bytes_sent=sum(kinds),
            bytes_usp=sum(calls.bytes_usp),
            saved_s=float((time * (before / rho - 1)).sum()),
            left_s=float((time * (1 - 1 / rho)).sum()),
            strategies=dict(sorted(Counter(calls.strategy).items())),
        )


@dataclass(frozen=True)
class RunReport:
    """One run.

    max_abs_diff: largest difference of the final latents from one process without parallelism, or None if not compared
    seconds:      the pipeline's wall time on rank 0, loading and compiling excluded; of a transformer without a
                  pipeline, from its first attention to the end of its last
    """

    model: str
    host: str
    world_size: int
    strategy: str
    planner: str
    max_abs_diff: float | None
    layers: Sequence[LayerReport]
    seconds: float
    environment: Environment
    calls: CallColumns
    ranks: RankTotals

    @cached_property
    def totals(self) -> Totals:
        """Of all attentions."""
        return Totals.of(self.calls, self.seconds)

    @classmethod
    def read(cls, path: Path) -> RunReport:
        """Reads a report.json, or that of a folder. Raises ValueError when it is not one."""
        path = path / "report.json" if path.is_dir() else path
        try:
            values = json.loads(path.read_text(), parse_constant=_refuse)
            if not isinstance(values, dict) or values.pop("format", None) != FORMAT:
                raise ValueError(f"it is not of format {FORMAT!r}")
            values.pop("totals", None)  # they follow from the columns
            inside = {
                "layers": tuple(_built(LayerReport, layer) for layer in values["layers"]),
                "environment": _built(Environment, values["environment"]),
                "calls": _built(CallColumns, values["calls"]),
                "ranks": _built(RankTotals, values["ranks"]),
            }
            return cast(RunReport, _built(cls, {**values, **inside}))
        except (OSError, KeyError, TypeError, ValueError, RecursionError) as error:
            raise UserError(
                f"{path} is not a db-SP report ({' '.join(str(error).split())}); a run leaves one in the folder of "
                "setting `report`, or --sp-report DIR"
            ) from error

    def to_json(self) -> str:
        """What `read` reads, with `totals` for other readers."""
        content = {"format": FORMAT, **asdict(self), "totals": asdict(self.totals)}
        return json.dumps(content, allow_nan=False) + "\n"

    def write(self, path: Path) -> None:
        """Writes JSON, whole or not at all."""
        write_atomically(path, self.to_json())


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if len(values) else 0.0


def _built(cls: type, values: Any) -> Any:
    """cls(**values). Raises ValueError for no mapping, and for a value of another type than its field's."""
    if not isinstance(values, Mapping):
        raise ValueError(f"it has {values!r} where {cls.__name__} belongs")
    hints = get_type_hints(cls)
    for name, value in values.items():
        if name in hints and not _is_a(value, hints[name]):
            kind = str(getattr(hints[name], "__name__", hints[name])).replace("collections.abc.", "")
            raise ValueError(f"its {name!r} is no {kind}")
    return cls(**values)


def _is_a(value: Any, hint: Any) -> bool:
    """Whether JSON's value is of that type: any number is a float, and a whole one fits into 64 bits."""
    origin, inside = get_origin(hint), get_args(hint)
    if origin is Sequence:
        return isinstance(value, (list, tuple)) and all(_is_a(one, inside[0]) for one in value)
    if origin is Mapping:
        return isinstance(value, dict) and all(_is_a(one, inside[1]) for one in value.values())
    if inside:
        return any(_is_a(value, one) for one in inside)
    if hint is float:
        return isinstance(value, (int, float)) and math.isfinite(value)
    if hint is int:
        return isinstance(value, int) and abs(value) < 2**63
    return hint is Any or isinstance(value, hint)


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no number")
