"""Quality and time of planner "dbsp", on one core and without a GPU: ρ_s, rows moved, split heads and planning time.

plan_ms: processor time, which other programs on the machine lengthen less than the clock's
kv: keys that the worst rank receives, over those of whole heads in equal numbers
slower: modelled time of the plan without a price (ρ_s 1.002, splits for nothing) over this plan's, less one

python -m scripts.bench.planner                  Wan2.1-14B's size, masks of many kinds, P = 8 and 6
python -m scripts.bench.planner --extremes       one dense head, one block row, few heads, few blocks, no work
python -m scripts.bench.planner --recorded FILE  masks of a mask file, such as tests/data/learned-masks.safetensors
python -m scripts.bench.planner --scale          planning time up to P = 128 and a million tokens (counts drawn)
python -m scripts.bench.planner --json > FILE    the same numbers for a program
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product

import numpy as np

from dbsp_core.layout.sequence_layout import SequenceLayout
from dbsp_core.layout.strategy import Strategy
from dbsp_core.masks.grid import BlockGrid
from dbsp_core.masks.mask_file import MaskFile
from dbsp_core.planning.balance import imbalance_ratio, rho_bound, work_by_rank
from dbsp_core.planning.chunks import columns_of_heads
from dbsp_core.planning.planners import Problem, contiguous_heads, dbsp, head_price, majority_rank, rank_times
from dbsp_core.sources.base import MaskRequest
from dbsp_core.sources.synthetic.source import SyntheticSource
from scripts.results.result import print_table

FIELDS = ("mask", "heads", "strategy", "before", "rho", "bound", "moved", "kv", "split_heads", "slower", "plan_ms")
HEADS, GPUS, BLOCKS, LAYOUT, SEED = (40, 12, 5, 3), (8, 6), 1182, "striped", 0
"""Of masks: heads to try, ranks to plan for, and query and KV blocks of 64 tokens, which make 75,600."""
Works = Iterator[tuple[str, np.ndarray, tuple[int, ...], BlockGrid | None]]
"""Names, int64[H, nq] active blocks, ranks to plan for, and grids; blocks of 64 by default."""


def synthetic(density: float, spread: float) -> Callable[[int, int, int], np.ndarray]:
    def bits(heads: int, blocks: int, seed: int) -> np.ndarray:
        request = MaskRequest(layer=0, heads=heads, thw=(1, blocks, 64))
        return SyntheticSource(density=density, spread=spread, seed=seed).mask(request).bits.numpy()

    return bits


def beta(heads: int, blocks: int, seed: int) -> np.ndarray:
    """Head densities from nearly empty to nearly full; row and column profiles shared by all heads."""
    rng = np.random.default_rng(seed)
    profile = np.interp(np.linspace(0, 6, blocks), np.arange(7), rng.uniform(0.3, 1, 7))
    each = np.outer(profile, profile[::-1]).astype(np.float32)
    return np.stack([rng.random(each.shape, dtype=np.float32) < d * each for d in rng.beta(0.8, 1.5, heads)])


def banded(heads: int, blocks: int, seed: int) -> np.ndarray:
    """Bands around the diagonal, diagonals at frame stride, and bands with dense first columns, one after another."""
    rng = np.random.default_rng(seed)
    distance = np.abs(np.subtract.outer(np.arange(blocks), np.arange(blocks)))
    bits = np.zeros((heads, blocks, blocks), dtype=bool)
    for head in range(heads):
        if head % 3 == 1:
            frame = int(rng.integers(20, 90))
            bits[head] = distance % frame < rng.integers(2, frame // 2)
        else:
            bits[head] = distance < rng.integers(5, blocks // (3 if head % 3 == 0 else 20))
            bits[head, :, : blocks // 20 * (head % 3 == 2)] = True
    return bits


def sinks(heads: int, blocks: int, seed: int) -> np.ndarray:
    """Sparse heads with a few dense columns each, and a few rows and columns of text that are dense in all."""
    rng = np.random.default_rng(seed)
    bits = np.stack([rng.random((blocks, blocks), dtype=np.float32) < d for d in 0.3 * rng.beta(1, 3, heads)])
    for head in range(heads):
        bits[head][:, rng.integers(0, blocks, 6)] = True
    bits[:, :4] = bits[:, :, :4] = True
    return bits


def one_dense(heads: int, blocks: int, seed: int) -> np.ndarray:
    """One head nearly full, of the others the diagonal alone."""
    bits = np.tile(np.eye(blocks, dtype=bool), (heads, 1, 1))
    bits[heads // 2] = np.random.default_rng(seed).random((blocks, blocks)) < 0.9
    return bits


SYNTHETIC = ((0.2, 1.0), (0.3, 0.6), (0.4, 0.3), (0.5, 0.6), (0.7, 1.0))  # densities and spreads
MASKS: dict[str, Callable[[int, int, int], np.ndarray]] = {
    **{f"synthetic {density} ±{spread}": synthetic(density, spread) for density, spread in SYNTHETIC},
    "beta": beta,
    "banded": banded,
    "sinks": sinks,
    "one dense": one_dense,
}


def ring_ranks_of(grid: BlockGrid, strategy: Strategy, layout: str) -> np.ndarray:
    """int64[nq]: ring rank that holds each query block outside attention."""
    segments = SequenceLayout.named(layout, grid, strategy).segments(grid.q_axis)
    return majority_rank(segments.tokens_by_ring(grid.nq, strategy))


def measure(rows: np.ndarray, strategy: Strategy, repeat: int, grid: BlockGrid | None) -> dict[str, object]:
    """One plan of int64[H, nq] active blocks, timed `repeat` times; the shortest counts. Blocks of 64 by default."""
    heads, blocks = rows.shape
    grid, world, parts = grid or BlockGrid.uniform(blocks * 64), strategy.world, (strategy.ulysses, strategy.ring)
    ring_rank, price, times = ring_ranks_of(grid, strategy, LAYOUT), head_price(grid, strategy), []
    problem = Problem(strategy, rows, ring_rank, price)
    for _ in range(repeat):
        start = time.thread_time()
        owner = dbsp(problem)
        times.append((time.thread_time() - start) * 1e3)
    free = dbsp(replace(problem, price=0))
    slowest, slowest_free = (int(rank_times(rows, one, *parts, price).max()) for one in (owner, free))
    plain = ring_ranks_of(grid, strategy, "contiguous") * strategy.ulysses
    before = plain + contiguous_heads(heads, strategy.ulysses)[:, None]
    columns = columns_of_heads(owner, strategy.ulysses)
    return {
        "strategy": str(strategy),
        "before": imbalance_ratio(work_by_rank(before, rows, world)),
        "rho": imbalance_ratio(work_by_rank(owner, rows, world)),
        "bound": rho_bound(rows, world),
        "moved": float((owner // strategy.ulysses != ring_rank).mean()),
        "kv": float(columns.sum(axis=0).max() / -(-heads // strategy.ulysses)),
        "split_heads": int((columns.sum(axis=1) > 1).sum()),
        "slower": slowest_free / slowest - 1 if slowest else 0.0,
        "plan_ms": min(times),
    }


def masks() -> Works:
    for name, make in MASKS.items():
        for heads in HEADS:
            yield name, make(heads, BLOCKS, SEED).sum(axis=2), GPUS, None


def recorded(path: str) -> Works:
    file = MaskFile(path)
    for layer, group in product(range(file.layers), range(len(file.groups or (0,)))):
        mask = file.layer(layer, group)
        yield f"layer {layer}, group {group}", mask.counts.rows, GPUS, mask.grid


def scale() -> Works:
    """Counts drawn from the product of a head's and a row's density: masks this large do not fit."""
    sizes = [(1182, world) for world in (8, 16, 32, 64, 128)] + [(blocks, 8) for blocks in (3906, 7812, 15625)]
    for blocks, world in [*sizes, (15625, 128)]:
        rng = np.random.default_rng(SEED)
        density = rng.uniform(0.2, 0.6, 40)
        row = np.interp(np.linspace(0, 4, blocks), np.arange(5), rng.uniform(0.5, 1, 5))
        mean = density[:, None] * row * blocks
        rows = np.maximum(mean + rng.standard_normal(mean.shape) * np.sqrt(mean * 0.6), 0).astype(np.int64)
        yield f"{blocks * 64:,} tokens", rows, (world,), None


def extremes() -> Works:
    """Work that no mask of a model has, 600 blocks but where said otherwise."""
    rng = np.random.default_rng(SEED)
    wave = np.interp(np.linspace(0, 4, 600), np.arange(5), rng.uniform(0.5, 1, 5))
    one_dense, one_block_row, one_row = (np.zeros((40, 600), dtype=np.int64) for _ in range(3))
    one_dense[:], one_dense[7] = 12, 600
    one_block_row[:, 5] = rng.integers(100, 600, 40)
    one_row[3, 5] = 500
    works = {
        "like the paper's": rng.binomial(600, 0.05 + 0.6 * rng.random((40, 1)) * wave),
        "one dense head of 40": one_dense,
        "all in one block row": one_block_row,
        "all in one row": one_row,
        "3 heads": rng.binomial(600, np.array([[0.2], [0.5], [0.9]]) * wave),
        "56 heads": rng.binomial(600, rng.random((56, 1)) * wave),
        "5 blocks": rng.integers(1, 6, (40, 5)),
        "2 heads of 3 blocks": rng.integers(1, 6, (2, 3)),
        "no work": np.zeros((40, 600), dtype=np.int64),
    }
    for name, rows in works.items():
        yield name, rows, (8, 16), None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=5, help="plans timed; the shortest time counts")
    parser.add_argument("--extremes", action="store_true", help="work that no mask of a model has")
    parser.add_argument("--scale", action="store_true", help="planning time up to P = 128 and a million tokens")
    parser.add_argument("--recorded", metavar="FILE", help="masks of a mask file")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    args = parser.parse_args()
    kinds = {scale: args.scale, extremes: args.extremes}
    works = recorded(args.recorded) if args.recorded else next((kind for kind, on in kinds.items() if on), masks)()
    plans = [
        {"mask": name, "heads": len(rows), "seed": SEED, **measure(rows, strategy, args.repeat, grid)}
        for name, rows, worlds, grid in works
        for strategy in (strategy for world in worlds for strategy in Strategy.all_for(world))
    ]
    if args.json:
        print(json.dumps({"plans": plans}, indent=1))
        return
    print_table(f"planner dbsp, {LAYOUT} layout", [{field: record[field] for field in FIELDS} for record in plans])


if __name__ == "__main__":
    main()
