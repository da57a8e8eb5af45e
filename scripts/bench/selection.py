"""What choosing a strategy by predicted time costs against knowing the fastest: regret, measured in turns in one run.

python -m scripts.bench.selection --ranks 2 --hardware cpu-demo       gloo ranks with one core each
python -m scripts.bench.selection --json > FILE                       the same numbers for a program

Every strategy's attention is measured under planner "dbsp", and predicted with the constants of --hardware. Regret is
the measured time of the one predicted to be fastest over that of the one measured to be fastest, less one. "Of
measuring" is what the same costs where the choice is made by every second measurement and checked by the others: with
strategies as close as these, nobody can do better on this machine.
"""

from __future__ import annotations

import argparse
import json

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from dbsp_cli.calibrate.calibrate import predict_case
from dbsp_cli.calibrate.cases import Case
from dbsp_cli.calibrate.measure import Setting, measure_attentions
from dbsp_cli.calibrate.timing import median_time, run_ranks
from dbsp_core.cost.hardware import device_class, load_hardware
from dbsp_core.layout.strategy import Strategy

CASES = (
    Case(12, 2048, 64, 0.3, seed=21),
    Case(12, 4096, 64, 0.15, seed=22),
    Case(3, 4096, 64, 0.4, seed=23),
    Case(5, 3072, 128, 0.3, seed=24, slope=0.8),
    Case(16, 1024, 32, 0.1, seed=25),
    Case(1, 4096, 128, 0.5, seed=26),
    Case(8, 3072, 64, 0.6, seed=27, slope=0.2),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--hardware", default="cpu-demo", help="whose constants predict")
    parser.add_argument("--repeats", type=int, default=9, help="turns; the median of quiet ones stands")
    parser.add_argument("--patience", type=float, default=0.0, help="seconds to wait, in all, for a quiet machine")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = "bfloat16" if device == "cuda" else "float32"
    hardware = load_hardware(args.hardware)
    strategies = Strategy.all_for(args.ranks)
    ways = tuple((case, str(strategy), "dbsp") for case in CASES for strategy in strategies)
    setting = Setting(device, getattr(torch, dtype), "auto", args.repeats, args.patience)
    by_rank = run_ranks(measure_attentions, args.ranks, device, ways, setting)
    seconds = median_time(by_rank).reshape(len(CASES), -1)
    turns = ([[laps[first::2] for laps in rank] for rank in by_rank] for first in (0, 1))
    halves = [median_time(half).reshape(len(CASES), -1) for half in turns]
    rows = []
    for case, measured, *half in zip(CASES, seconds.tolist(), *halves, strict=True):
        predicted = [predict_case(case, strategy, "dbsp", hardware, dtype).total_s for strategy in strategies]
        chosen = predicted.index(min(predicted))
        rows.append(
            {
                "heads": case.heads,
                "tokens": case.tokens,
                "head_dim": case.head_dim,
                "density": case.density,
                "measured_s": dict(zip(map(str, strategies), measured, strict=True)),
                "predicted_s": dict(zip(map(str, strategies), predicted, strict=True)),
                "chosen": str(strategies[chosen]),
                "regret": measured[chosen] / min(measured) - 1,
                "regret_of_measuring": (_regret(*half) + _regret(*half[::-1])) / 2,
            }
        )
    mean, least = (sum(row[name] for row in rows) / len(rows) for name in ("regret", "regret_of_measuring"))
    if args.json:
        about = {"label": f"measured, {args.ranks} ranks", "device": device_class(device), "hardware": args.hardware}
        means = {"mean_regret": mean, "mean_regret_of_measuring": least}
        print(json.dumps({**about, **means, "cases": rows}, indent=1))
        return
    caption = f"mean regret {mean:.2%}, of measuring {least:.2%}"
    table = Table(title=f"measured, {args.ranks} ranks, {device_class(device)}", caption=caption)
    for name in ("heads", "tokens", "D", "density", *map(str, strategies), "chosen", "regret", "of measuring"):
        table.add_column(name, justify="right")
    for row in rows:
        times = (f"{1e3 * one:.1f} ms" for one in row["measured_s"].values())
        shape = (str(row[key]) for key in ("heads", "tokens", "head_dim", "density"))
        table.add_row(*shape, *times, row["chosen"], f"{row['regret']:.1%}", f"{row['regret_of_measuring']:.1%}")
    Console(width=max(110, Console().width)).print(table)


def _regret(judge: NDArray[np.float64], guide: NDArray[np.float64]) -> float:
    """By `judge`, of the strategy that is fastest by `guide`. Both: seconds by strategy."""
    return float(judge[guide.argmin()] / judge.min() - 1)


if __name__ == "__main__":
    main()
