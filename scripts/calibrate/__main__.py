"""Measures this machine for the latency model: dense blocks, all-to-all, P2P, launches; fits, prints and writes.

python -m scripts.calibrate --ranks 8  the GPUs of this node; runs then use the result
python -m scripts.calibrate --out FILE --check  two ranks, to a file for `machine`, and checks
python -m scripts.calibrate --ranks 1 --communication h200 --out FILE  one GPU
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch

from dbsp_cli.output import TextTable, print_json, print_tables, require_file_place
from dbsp_core.cost.machine import Hardware, load_hardware, measured_file
from dbsp_core.utils.errors import UserError
from dbsp_core.utils.files import user_path
from scripts.calibrate.calibrate import Calibration, Checked, calibrate, check
from scripts.calibrate.hardware_file import save_hardware

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


def main(words: Sequence[str] | None = None) -> None:
    """Runs the program. A user error is one line on standard error and exit code 2."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.calibrate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=user_path, help="YAML file; default: where runs on this machine look for it")
    parser.add_argument("--ranks", type=int, default=2, help="one GPU each if there are any, else one core")
    parser.add_argument("--quick", action="store_true", help="seconds instead of a minute: rough")
    parser.add_argument("--kernel", default="auto", help="attention kernel to measure")
    parser.add_argument("--communication", help="hardware whose communication is taken if one rank is measured")
    parser.add_argument("--patience", type=float, default=0.0, help="seconds to wait, in all, for a quiet machine")
    parser.add_argument("--check", action="store_true", help="measure held-out shapes, and compare")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    try:
        _run(parser.parse_args(words))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from error


def _run(options: argparse.Namespace) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    out = options.out or measured_file(device)
    if options.out is None:
        _make_folder(out.parent)
    require_file_place(out, "--out")
    how = {"quick": options.quick, "kernel": options.kernel, "max_wait_s": options.patience}
    other = load_hardware(options.communication) if options.communication else None
    fitted = calibrate(out.stem, options.ranks, communication=other, **how)
    checked = check(fitted.hardware, options.ranks, **how) if options.check else []
    if options.json:
        print_json(**_report(fitted, checked))
    else:
        print_tables([_fit_table(fitted), *([_check_table(checked)] if checked else [])])
    fault = _fault_of(fitted.hardware, checked)
    if fault is not None:
        raise UserError(
            f"{out} is not written: {fault}; something else was running here: try again when it is done, wait for "
            "quiet moments with --patience 120, and leave out --quick"
        )
    save_hardware(out, fitted.hardware, fitted.record)
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
        f"held-out shapes are predicted wrong by up to {worst:.0%}, more than {_WORST:.0%}" if worst > _WORST else None
    )


def _report(fitted: Calibration, checked: list[Checked]) -> dict[str, object]:
    report: dict[str, object] = {"hardware": asdict(fitted.hardware) | fitted.record}
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
        f"{known.name}: {known.device}, {known.dtype}, kernel {fitted.record['versions']['kernel']}",
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
    title = f"whole attentions, held-out shapes: worst error {worst:.1%}"
    return TextTable(title, names, rows, left=("strategy", "planner"), spare=("D", "tokens", "heads"))


if __name__ == "__main__":
    main()
