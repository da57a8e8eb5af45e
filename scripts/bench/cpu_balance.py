"""Gain of balance in one attention on CPUs, beside what ρ_s promises.

Each rank of two computes alone, with exchanges that are answered at once, and is timed in thread CPU seconds: USP's
contiguous plan and planner "dbsp" by turns, on Ulysses and on a ring. The slowest rank counts. If nothing but blocks
took time, the speed-up would be ρ_s before over ρ_s after.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator

import numpy as np
import torch

from dbsp_core import BlockGrid, BlockMask, DualBalancedAttention, Plan, Strategy, make_plan
from dbsp_core.planning.plan import usual_layout
from scripts.bench.alone_rank import AloneRank
from scripts.results.result import Result, Row, arguments

HEADS, TOKENS, HEAD_DIM, BLOCK, DENSITY = 12, 16384, 64, 64, 0.3
CASES = (("U2R1", 1, 0.6), ("U1R2", 2, 0.5))  # strategy, seed and slope of the mask
PLANNERS = "contiguous", "dbsp"


def growing_mask(seed: int, slope: float) -> BlockMask:
    """Returns random blocks; heads, rows and columns grow denser from first to last: 1 − slope to 1 + slope times."""
    grid, rng = BlockGrid.uniform(TOKENS, BLOCK), np.random.default_rng(seed)
    shape = HEADS, grid.nq, grid.nk
    head, row, column = (np.linspace(1 - slope, 1 + slope, n, dtype=np.float32) for n in shape)
    bits = [rng.random(shape[1:], dtype=np.float32) < DENSITY * of * row[:, None] * column for of in head]
    return BlockMask(torch.from_numpy(np.stack(bits)), grid)


def calls_of_ranks(plan: Plan, mask: BlockMask) -> Iterator[Callable[[], object]]:
    """Yields a call of the attention on each rank, whose tables are made and checked."""
    layout, world = usual_layout(plan.planner, mask.grid, plan.strategy), plan.strategy.world
    qkv = torch.randn(3, 1, HEADS, layout.shard, HEAD_DIM)
    for rank in range(world):
        attend = DualBalancedAttention.prepare(plan, mask, layout, AloneRank(rank, world), kernel="cpu")
        yield lambda attend=attend: attend(*qkv)


def measure(options: argparse.Namespace) -> Iterator[Row]:
    """before_s, after_s: CPU seconds of the slowest rank under each planner; reached: speed-up over `expected`"""
    torch.set_num_threads(1)
    for name, seed, slope in CASES:
        strategy, mask = Strategy.parse(name), growing_mask(seed, slope)
        plans = [
            make_plan(mask, strategy, planner, layout=usual_layout(planner, mask.grid, strategy))
            for planner in PLANNERS
        ]
        calls = [list(calls_of_ranks(plan, mask)) for plan in plans]
        seconds = [[[] for _ in of_plan] for of_plan in calls]
        for turn in range(options.turns + 1):
            for of_plan, into in zip(calls, seconds, strict=True):
                for call, times in zip(of_plan, into, strict=True):
                    start = time.thread_time()
                    call()
                    if turn:  # the first compares, and fills memory
                        times.append(time.thread_time() - start)
        before, after = (max(map(statistics.median, of_plan)) for of_plan in seconds)
        rho_before, rho = plans[1].rho_before, plans[1].rho
        speedup, expected = before / after, rho_before / rho
        yield Row(
            strategy=name,
            rho_before=rho_before,
            rho=rho,
            before_s=before,
            after_s=after,
            speedup=speedup,
            expected=expected,
            reached=speedup / expected,
            label="measured on a CPU",
        )


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--turns", type=int, default=9, help="times that each is measured; the median counts")
    Result("cpu-balance", "Speed-up over ρ_s").run(parser, measure)


if __name__ == "__main__":
    main()
