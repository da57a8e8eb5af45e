"""`dbsp calibrate`: measure this machine for the latency model, or check constants measured before."""

from __future__ import annotations

import math
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer

from dbsp_cli.calibrate.calibrate import Calibration, Checked, calibrate, check
from dbsp_cli.output import PATH, JsonFlag, TextTable, print_json, print_tables, working
from dbsp_core.cost.hardware import Hardware, load_hardware, save_hardware, warn_if_elsewhere
from dbsp_core.cost.own_hardware import measured_file
from dbsp_core.utils.errors import UserError
from dbsp_core.utils.paths import require_file_place
from dbsp_kernels import choose_kernel

__all__ = ["calibrate_command"]

_WORST = 0.5
"""Relative error of a prediction above which constants are not written: `auto` would choose by something else."""
_CONSTANTS_OF = {
    "compute": ("flops_per_s", "score_s", "row_s", "launch_s"),
    "merge": ("merge_bytes_per_s",),
    "linear": ("linear_flops_per_s",),
    "exchange": ("exchange_latency_s", "exchange_bytes_per_s"),
    "p2p": ("p2p_latency_s", "p2p_bytes_per_s"),
    "call": ("pack_bytes_per_s", "call_s"),
}


def calibrate_command(
    out: Annotated[
        Path | None,
        typer.Option(help="YAML file to write; default: where runs on this machine look for it.", **PATH),
    ] = None,
    ranks: Annotated[int, typer.Option(max=1024, help="Ranks: one GPU each where there are any, else one core.")] = 2,
    quick: Annotated[bool, typer.Option("--quick", help="Seconds instead of a minute: rough.")] = False,
    kernel: Annotated[str, typer.Option(help="Attention kernel to measure.")] = "auto",
    communication: Annotated[
        str | None, typer.Option(help="Hardware whose communication is taken where one rank cannot measure it.")
    ] = None,
    patience: Annotated[float, typer.Option(help="Seconds to wait, in all, for a quiet machine.")] = 0.0,
    checking: Annotated[bool, typer.Option("--check", help="Measure shapes held out, and compare.")] = False,
    hardware: Annotated[str | None, typer.Option(help="With --check: constants to check, not measured now.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Measure this machine for the latency model: dense blocks, all-to-all, P2P, launches; fit, print, write."""
    if hardware is not None and not checking:
        raise UserError("--hardware names constants to check; add --check, or leave it out to measure")
    if hardware is not None and out is not None:
        raise UserError("--hardware and --out exclude each other: nothing is measured that could be written")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if hardware is None and out is None and not checking:
        out = measured_file(device)
        _make_folder(out.parent)
    if out is not None:
        require_file_place(out, "--out")
    fitted = None
    if hardware is not None:
        known = load_hardware(hardware)
        warn_if_elsewhere(known, device, choose_kernel(kernel, device, getattr(torch, known.dtype)).name)
    else:
        other = load_hardware(communication) if communication else None
        name = out.stem if out else "this machine"
        with working(f"measuring this machine on {ranks} ranks"):
            fitted = calibrate(name, ranks, quick=quick, kernel=kernel, communication=other, max_wait_s=patience)
        known = fitted.hardware
    checked = []
    if checking:
        with working("measuring whole attentions of shapes held out"):
            checked = check(known, ranks, quick=quick, kernel=kernel, max_wait_s=patience)
    if as_json:
        print_json(**_report(known, fitted, checked))
    else:
        print_tables(([_fit_table(fitted)] if fitted else []) + ([_check_table(checked)] if checked else []))
    if out is not None:
        fault = _fault_of(known, checked)
        if fault is not None:
            raise UserError(
                f"{out} is not written: {fault}; something else was running here: try again when it is done, wait for "
                "quiet moments with --patience 120, and leave out --quick"
            )
        save_hardware(out, known)
        print(f"wrote {out}", file=sys.stderr)


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot make {folder} ({error.strerror}); name another file with --out FILE") from error


def _fault_of(known: Hardware, checked: list[Checked]) -> str | None:
    """Returns why constants must not be used, or None."""
    infinite = [
        name for name, value in vars(known.constants).items() if value is not None and not math.isfinite(value)
    ]
    if infinite:
        return f"{', '.join(infinite)} came out infinite"
    worst = max((abs(one.error) for one in checked), default=0.0)
    return (
        f"shapes held out are predicted wrong by up to {worst:.0%}, more than {_WORST:.0%}" if worst > _WORST else None
    )


def _report(known: Hardware, fitted: Calibration | None, checked: list[Checked]) -> dict[str, object]:
    report: dict[str, object] = {"hardware": asdict(known)}
    if fitted is not None:
        report["errors"] = {part: one.errors.round(4).tolist() for part, one in fitted.fits.items()}
    if checked:
        report["held_out"] = [asdict(one) | {"error": one.error} for one in checked]
        report["worst_error"] = max(abs(one.error) for one in checked)
    return report


def _fit_table(fitted: Calibration) -> TextTable:
    known = fitted.hardware
    rows = []
    for part, one in fitted.fits.items():
        constants = ", ".join(f"{name} {getattr(known.constants, name):.3g}" for name in _CONSTANTS_OF[part])
        worst = f"{one.errors[np.abs(one.errors).argmax()]:+.1%}"
        rows.append((part, constants, f"{one.residual:.1%}", worst, str(len(one.errors))))
    return TextTable(
        f"{known.name}: {known.device}, {known.dtype}, kernel {known.versions.get('kernel')}",
        ("part", "constants", "rms error", "worst", "samples"),
        [*rows, ("overlap", f"overlap {known.constants.overlap:.3g}", "", "", "")],
        "errors: predicted over measured, less one, of the samples fitted to",
        left=("part", "constants"),
    )


def _check_table(checked: list[Checked]) -> TextTable:
    rows = []
    for one in checked:
        case = one.case
        sizes = (str(case.heads), f"{case.tokens:,}", str(case.head_dim), f"{case.density:g}")
        times = (f"{one.measured_s * 1e3:.1f}", f"{one.predicted_s * 1e3:.1f}", f"{one.error:+.1%}")
        rows.append((*sizes, one.strategy, one.planner, *times))
    names = ("heads", "tokens", "D", "density", "strategy", "planner", "measured ms", "predicted ms", "error")
    worst = max(abs(one.error) for one in checked)
    title = f"whole attentions, shapes held out: worst error {worst:.1%}"
    return TextTable(title, names, rows, left=("strategy", "planner"), spare=("D", "tokens", "heads"))
