"""Constants of the latency model from measurements, and what they are worth on shapes held out."""

from __future__ import annotations

import datetime
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from dbsp_core.cost.machine import Constants, Hardware, device_class
from dbsp_core.cost.prediction import MERGE_BYTES, AttentionShape, Prediction, predict
from dbsp_core.layout.sequence_layout import SequenceLayout
from dbsp_core.layout.strategy import Strategy
from dbsp_core.planning.plan import make_plan
from dbsp_core.planning.planners import require_planner
from dbsp_core.utils.errors import UserError
from dbsp_kernels import choose_kernel
from scripts.calibrate.cases import Case, Sizes, held_out, sizes_for
from scripts.calibrate.fit import Fit, fit
from scripts.calibrate.hardware_file import software_versions
from scripts.calibrate.measure import Setting, measure_attentions, measure_parts
from scripts.calibrate.timing import median_time, run_ranks

__all__ = ["Calibration", "Checked", "calibrate", "check", "constants_from", "predict_case", "with_communication_of"]

COMMUNICATION = (
    "exchange_latency_s",
    "exchange_bytes_per_s",
    "p2p_latency_s",
    "p2p_bytes_per_s",
    "network_latency_s",
    "network_bytes_per_s",
)
"""The constants that one device alone cannot measure."""


@dataclass(frozen=True, eq=False)
class Calibration:
    """A calibrated machine.

    Attributes:
        hardware: The constants, ready to be saved.
        fits: By part of the model.
        seconds: By part, the measured times that were fitted.
        record: How the constants were measured: software versions, residuals of the fits, date and notes.
    """

    hardware: Hardware
    fits: dict[str, Fit]
    seconds: dict[str, np.ndarray]
    record: dict[str, Any]


@dataclass(frozen=True)
class Checked:
    """A shape that was held out, predicted and measured."""

    case: Case
    strategy: str
    planner: str
    measured_s: float
    predicted_s: float

    @property
    def error(self) -> float:
        """Predicted over measured, less one."""
        return self.predicted_s / self.measured_s - 1


def calibrate(
    name: str,
    ranks: int,
    *,
    quick: bool = False,
    kernel: str = "auto",
    communication: Hardware | None = None,
    max_wait_s: float = 0.0,
) -> Calibration:
    """Measures this machine on `ranks` ranks (GPUs where there are any, else CPU cores) and fits the constants.

    Args:
        communication: Another machine's constants for what one rank cannot measure.
        max_wait_s: Seconds to wait, in all, for moments in which nothing else runs here.

    Raises:
        UserError: The kernel cannot serve here, there are fewer GPUs than ranks, or one rank lacks `communication`.
    """
    device, dtype = _device(ranks)
    if ranks == 1 and communication is None:
        raise UserError("one rank cannot measure communication; use --ranks 2 or more, or --communication h200")
    kernel = choose_kernel(kernel, device, getattr(torch, dtype)).name
    sizes = sizes_for(device, quick)
    setting = Setting(device, getattr(torch, dtype), kernel, sizes.repeats, max_wait_s)
    by_rank = run_ranks(measure_parts, ranks, device, sizes, setting)
    seconds = {part: median_time([one[part] for one in by_rank]) for part in by_rank[0]}
    constants, fits = constants_from(sizes, seconds, ranks, dtype, communication)
    labels = {key: "measured" for key, value in vars(constants).items() if value is not None}
    hardware = Hardware(
        name=name,
        device=device_class(device),
        dtype=dtype,
        constants=constants,
        sources=labels | {"serial_s": "assumed"},
    )
    notes = f"python -m scripts.calibrate, {ranks} ranks{', quick: rough' if quick else ''}."
    if ranks == 1 and communication is not None:
        hardware = with_communication_of(hardware, communication)
        notes = f"{notes} Communication from {communication.name!r}."
    record = {
        "versions": software_versions(kernel),
        "residuals": {part: round(one.residual, 4) for part, one in fits.items()},
        "date": datetime.date.today().isoformat(),
        "notes": notes,
    }
    return Calibration(hardware, fits, seconds, record)


def with_communication_of(own: Hardware, other: Hardware) -> Hardware:
    """Returns a machine's compute with another's communication, labelled as it is there."""
    constants = replace(own.constants, **{name: getattr(other.constants, name) for name in COMMUNICATION})
    names = (*COMMUNICATION, "gpus_per_node")
    kept = {name: label for name, label in own.sources.items() if name not in names}
    taken = {name: label for name, label in other.sources.items() if name in names}
    return replace(own, constants=constants, sources=kept | taken, gpus_per_node=other.gpus_per_node)


def _device(ranks: int) -> tuple[str, str]:
    """("cuda" or "cpu", dtype). Raises UserError where there are GPUs, but fewer than ranks."""
    if ranks < 1:
        raise UserError(f"--ranks must be at least 1, got {ranks}")
    if not torch.cuda.is_available():
        return "cpu", "float32"
    if ranks > torch.cuda.device_count():
        raise UserError(f"{ranks} ranks need {ranks} GPUs, there are {torch.cuda.device_count()}; use fewer --ranks")
    return "cuda", "bfloat16"


def constants_from(
    sizes: Sizes, seconds: dict[str, np.ndarray], ranks: int, dtype: str, communication: Hardware | None = None
) -> tuple[Constants, dict[str, Fit]]:
    """Returns the constants that explain the measured seconds best, part by part, and each part's fit.

    Args:
        seconds: By part, as `measure_parts` names them, in the order of `sizes`.
    """
    fits = {
        "compute": fit(np.array([_compute_columns(case) for case in sizes.compute]), seconds["compute"]),
        "merge": fit(np.array([[n * MERGE_BYTES, 1.0] for n in sizes.merges]), seconds["merge"]),
        "linear": fit(np.array([[2.0 * rows * width**2] for rows, width in sizes.linear]), seconds["linear"]),
    }
    per_flop, score_s, row_s, launch_s = fits["compute"].coefficients
    if ranks > 1:
        transfers = np.array([[1.0, size] for size in sizes.transfers])
        fits |= {part: fit(transfers, seconds[part]) for part in ("exchange", "p2p")}
        latencies = {part: fits[part].coefficients for part in ("exchange", "p2p")}
        known = {f"{part}_latency_s": pair[0] for part, pair in latencies.items()}
        known |= {f"{part}_bytes_per_s": _rate(pair[1]) for part, pair in latencies.items()}
    else:
        known = {key: getattr(communication.constants, key) for key in COMMUNICATION} if communication else {}
    rough = Constants(
        flops_per_s=_rate(per_flop),
        score_s=score_s,
        row_s=row_s,
        launch_s=launch_s,
        call_s=0.0,
        pack_bytes_per_s=np.inf,
        merge_bytes_per_s=_rate(fits["merge"].coefficients[0]),
        overlap=1.0,
        linear_flops_per_s=_rate(fits["linear"].coefficients[0]),
        **known,
    )
    fits["call"] = _fit_call(sizes.call, seconds["call"], Strategy(ranks, 1), rough, dtype)
    per_byte, call_s = fits["call"].coefficients
    constants = replace(rough, pack_bytes_per_s=_rate(per_byte), call_s=call_s)
    if ranks > 1:
        overlap = _fit_overlap(sizes.overlap, seconds["overlap"], Strategy(1, ranks), constants, dtype)
        constants = replace(constants, overlap=overlap)
    return constants, fits


def _rate(seconds_per_unit: float) -> float:
    return 1 / seconds_per_unit if seconds_per_unit > 0 else float("inf")


def _compute_columns(case: Case) -> list[float]:
    """FLOP of the products, scores, rows and launches of a case."""
    mask = case.mask()
    scores = int(mask.bits.sum()) * mask.grid.block_q * mask.grid.block_k
    return [4.0 * scores * case.head_dim, scores, case.heads * mask.grid.nq, 1]


def _fit_call(cases: tuple[Case, ...], seconds: np.ndarray, strategy: Strategy, known: Constants, dtype: str) -> Fit:
    """Fits packing and bookkeeping: what an attention without dense blocks takes beyond its exchange and rows."""
    predictions = [
        predict_case(case, strategy, "contiguous", replace(known, pack_bytes_per_s=1.0), dtype) for case in cases
    ]
    columns = np.array([[p.pack_s, 1.0] for p in predictions])
    others = np.array([p.total_s - p.pack_s for p in predictions])
    return fit(columns, seconds, given=others)


def _fit_overlap(
    cases: tuple[Case, ...], seconds: np.ndarray, strategy: Strategy, known: Constants, dtype: str
) -> float:
    """Fits how far compute hides P2P: 1 is max(compute, P2P), 0 their sum; 1 where it makes no difference."""
    hidden, apart = (
        np.array(
            [predict_case(case, strategy, "contiguous", replace(known, overlap=o), dtype).total_s for case in cases]
        )
        for o in (1.0, 0.0)
    )
    gap = (apart - hidden) / seconds
    if not gap.any():
        return 1.0
    return float(np.clip((gap * (apart - seconds) / seconds).sum() / (gap**2).sum(), 0, 1))


def predict_case(case: Case, strategy: Strategy, planner: str, known: Constants | Hardware, dtype: str) -> Prediction:
    """Predicts a case on one node, under the sequence layout that the planner is meant for."""
    mask = case.mask()
    layout = SequenceLayout.named(require_planner(planner).layout, mask.grid, strategy)
    plan = make_plan(mask, strategy, planner, layout=layout)
    shape = AttentionShape(1, case.heads, case.head_dim, getattr(torch, dtype).itemsize)
    if isinstance(known, Constants):
        labels = {key: "measured" for key, value in vars(known).items() if value is not None}
        known = Hardware("being calibrated", "", dtype, known, labels)
    return predict(plan, shape, known, layout=layout)


def check(
    hardware: Hardware, ranks: int, *, quick: bool = False, kernel: str = "auto", max_wait_s: float = 0.0
) -> list[Checked]:
    """Predicts whole attentions of shapes that no sample had, then measures them."""
    device, dtype = _device(ranks)
    runs = dict.fromkeys(((f"U{ranks}R1", "contiguous"), (f"U{ranks}R1", "dbsp"), (f"U1R{ranks}", "dbsp")))
    cases = [(case, *run) for case in held_out(device, quick) for run in runs]
    setting = Setting(device, getattr(torch, dtype), kernel, sizes_for(device, quick).repeats, max_wait_s)
    by_rank = run_ranks(measure_attentions, ranks, device, tuple(cases), setting)
    return [
        Checked(
            case,
            strategy,
            planner,
            seconds,
            predict_case(case, Strategy.parse(strategy), planner, hardware, dtype).total_s,
        )
        for (case, strategy, planner), seconds in zip(cases, median_time(by_rank).tolist(), strict=True)
    ]
