"""Time of one attention: USP's contiguous plan against planner "dbsp", alternately in one run.

python -m scripts.bench.attention --ranks 2       gloo ranks that take turns on a core (with GPUs: NCCL, a GPU each)
python -m scripts.bench.attention --json > FILE   the same numbers for a program

Balance is worth what it should be if the speed-up is ρ_s before over ρ_s after. The time is that of the slowest rank:
on GPUs by the clock, on a CPU what it computes alone (`timing.Turns`).
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch

from dbsp_cli.commands.bench import imbalanced_mask
from dbsp_core import BlockGrid, BlockMask, DualBalancedAttention, SequenceGroup
from dbsp_core.cost.machine import device_class
from dbsp_core.layout.strategy import Strategy
from dbsp_core.planning.plan import make_plan, usual_layout
from scripts.bench.timing import Turns, TurnTakingGroup, gpu_seconds, run_ranks
from scripts.results.result import print_table


@dataclass(frozen=True)
class Case:
    """One attention over `tokens` tokens under an unequal mask."""

    heads: int
    tokens: int
    head_dim: int
    density: float
    seed: int
    slope: float

    def mask(self) -> BlockMask:
        return imbalanced_mask(self.heads, BlockGrid.uniform(self.tokens, 64), self.density, self.seed, self.slope)


PLANNERS = ("contiguous", "dbsp")
CASES = (
    Case(12, 4096, 64, 0.3, seed=1, slope=0.6),
    Case(12, 4096, 64, 0.3, seed=2, slope=0.5),
)


@dataclass(frozen=True)
class Comparison:
    """One attention under two plans.

    rho_before, rho:         ρ_s of the contiguous plan and of planner "dbsp"
    seconds_before, seconds: of the slowest rank
    """

    strategy: str
    rho_before: float
    rho: float
    seconds_before: float
    seconds: float

    @property
    def speedup(self) -> float:
        return self.seconds_before / self.seconds

    @property
    def expected(self) -> float:
        """ρ_s before over ρ_s after: the speed-up if nothing but blocks took time."""
        return self.rho_before / self.rho

    @property
    def reached(self) -> float:
        """The speed-up over what is expected of it."""
        return self.speedup / self.expected

    def record(self) -> dict[str, object]:
        """Returns the fields and ratios for JSON."""
        return asdict(self) | {"speedup": self.speedup, "expected": self.expected, "reached": self.reached}


def compare(cases: Sequence[Case], args: argparse.Namespace, device: str) -> list[Comparison]:
    """Measures the first case on Ulysses and the second on Ring, each with both planners, alternately in one run."""
    strategies = (Strategy(args.ranks, 1), Strategy(1, args.ranks))
    ways = [
        (case, str(strategy), planner)
        for case, strategy in zip(cases, strategies, strict=True)
        for planner in PLANNERS
    ]
    with tempfile.TemporaryDirectory() as folder:
        turns_file = str(Path(folder, "turns"))
        how = device, args.kernel, args.repeats, turns_file
        by_rank = run_ranks(measure_attentions, args.ranks, device, tuple(ways), *how)
    seconds = slowest_rank(by_rank)
    comparisons = []
    for number, (case, strategy) in enumerate(zip(cases, strategies, strict=True)):
        layout = usual_layout("dbsp", case.mask().grid, strategy)
        plan = make_plan(case.mask(), strategy, "dbsp", layout=layout)
        comparisons.append(Comparison(str(strategy), plan.rho_before, plan.rho, *seconds[2 * number : 2 * number + 2]))
    return comparisons


def slowest_rank(by_rank: Sequence[Sequence[Sequence[float]]]) -> list[float]:
    """Returns the slowest rank's seconds for each thing timed, medians over turns. by_rank: [rank][thing][turn]"""
    medians: list[float] = np.median(np.asarray(by_rank), axis=-1).max(axis=0).tolist()
    return medians


def measure_attentions(
    rank: int,
    world: int,
    ways: tuple[tuple[Case, str, str], ...],
    device: str,
    kernel: str,
    repeats: int,
    turns_file: str,
) -> list[list[float]]:
    """Returns seconds of whole attentions of (case, strategy, planner), interleaved: drift hits all identically."""
    turns = Turns(Path(turns_file))
    group = SequenceGroup.from_group() if device == "cuda" else TurnTakingGroup.of_all(turns)
    timed = gpu_seconds if device == "cuda" else turns.core_seconds
    calls = [_attention(*way, group, device, kernel) for way in ways]
    for call in calls:
        call()  # compiles, and compares what ranks were given
    seconds: list[list[float]] = [[] for _ in calls]
    for _ in range(repeats):
        for mine, call in zip(seconds, calls, strict=True):
            mine.append(timed(call))
    return seconds


def _attention(
    case: Case, strategy: str, planner: str, group: SequenceGroup, device: str, kernel: str
) -> Callable[[], object]:
    """Prepares an attention, and returns a call of it on this rank's random q, k, v."""
    mask = case.mask()
    layout = usual_layout(planner, mask.grid, Strategy.parse(strategy))
    plan = make_plan(mask, strategy, planner, layout=layout)
    attend = DualBalancedAttention.prepare(plan, mask, layout, group, device=device, kernel=kernel)
    where = {"device": device, "dtype": torch.bfloat16 if device == "cuda" else torch.float32}
    q, k, v = (torch.randn(1, case.heads, layout.shard, case.head_dim, **where) for _ in range(3))
    return lambda: attend(q, k, v)


def cases(args: argparse.Namespace) -> tuple[Case, ...]:
    scale = args.tokens / 4096
    return tuple(
        replace(
            case, heads=args.heads, tokens=round(case.tokens * scale), head_dim=args.head_dim, density=args.density
        )
        for case in CASES
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--density", type=float, default=0.3)
    parser.add_argument("--repeats", type=int, default=15, help="times that each is measured; the median counts")
    parser.add_argument("--kernel", default="auto")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    comparisons = compare(cases(args), args, device)
    how = f"measured, {args.ranks} ranks"
    if args.json:
        about = {"label": how, "device": device_class(device), "torch": str(torch.__version__)}
        sizes = {key: getattr(args, key) for key in ("heads", "tokens", "head_dim", "density", "repeats")}
        print(json.dumps({**about, **sizes, "cases": [comparison.record() for comparison in comparisons]}, indent=1))
        return
    print_table(
        f"{how}, {device_class(device)}; reached: speed-up over expected",
        [comparison.record() for comparison in comparisons],
    )


if __name__ == "__main__":
    main()
