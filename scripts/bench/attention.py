"""Wall time of one attention: USP's contiguous plan against planner "dbsp", in turns in one run.

python -m scripts.bench.attention --ranks 2       gloo ranks with one core each (with GPUs: NCCL, a GPU each)
python -m scripts.bench.attention --replay        one device: what each virtual rank of 4 and 8 computes, in turn
python -m scripts.bench.attention --json > FILE   the same numbers for a program

Balance is worth what it should be if the speed-up is ρ_s before over ρ_s after.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace

import torch
from rich.console import Console
from rich.table import Table

from dbsp_cli.calibrate.cases import Case
from dbsp_core.cost.hardware import device_class, load_hardware
from scripts.bench.comparison import Comparison, compare, replay

CASES = (
    ("Ulysses", Case(12, 4096, 64, 0.3, seed=1, slope=0.6)),
    ("Ring", Case(12, 4096, 64, 0.3, seed=2, slope=0.5)),
)


def cases(args: argparse.Namespace) -> tuple[Case, ...]:
    scale = args.tokens / 4096
    return tuple(
        replace(
            case, heads=args.heads, tokens=round(case.tokens * scale), head_dim=args.head_dim, density=args.density
        )
        for _, case in CASES
    )


def table(found: list[Comparison], title: str) -> Table:
    shown = Table(
        title=title, caption="speed-up over ρ: speed-up over (ρ_s before / ρ_s after); 1.00 is what it should be"
    )
    for name in ("strategy", "ρ_s before", "ρ_s", "ms before", "ms", "speed-up", "over ρ", "on core", "over ρ"):
        shown.add_column(name, justify="right")
    for one in found:
        ms = (f"{one.seconds_before * 1e3:.1f}", f"{one.seconds * 1e3:.1f}")
        ratios = (f"{one.rho_before:.3f}", f"{one.rho:.3f}")
        core = (
            (f"{one.core_speedup:.3f}", f"{one.core_speedup / one.expected:.3f}") if one.core_seconds else ("–", "–")
        )
        shown.add_row(one.strategy, *ratios, *ms, f"{one.speedup:.3f}", f"{one.reached:.3f}", *core)
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--replay", action="store_true", help="one device computes every virtual rank's rows in turn")
    parser.add_argument("--gpus", type=int, nargs="+", default=[4, 8], help="virtual ranks of --replay")
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--density", type=float, default=0.3)
    parser.add_argument("--repeats", type=int, default=15, help="turns; the median of quiet ones stands")
    parser.add_argument("--patience", type=float, default=0.0, help="seconds to wait, in all, for a quiet machine")
    parser.add_argument("--kernel", default="auto")
    parser.add_argument("--hardware", default="h200", help="whose communication --replay models")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if args.replay:
        found = [
            one
            for gpus in args.gpus
            for one in replay(cases(args), gpus, device, args.repeats, args.kernel, load_hardware(args.hardware))
        ]
        how = "replayed: compute measured on one device, communication modelled"
    else:
        found = compare(cases(args), args.ranks, device, args.repeats, args.kernel, args.patience)
        how = f"measured, {args.ranks} ranks"
    if args.json:
        about = {"label": how, "device": device_class(device), "torch": str(torch.__version__)}
        sizes = {key: getattr(args, key) for key in ("heads", "tokens", "head_dim", "density", "repeats")}
        print(json.dumps({**about, **sizes, "cases": [one.record() for one in found]}, indent=1))
        return
    Console(width=max(110, Console().width)).print(table(found, f"{how}, {device_class(device)}"))


if __name__ == "__main__":
    main()
