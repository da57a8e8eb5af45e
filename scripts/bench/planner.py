"""What planner "dbsp" reaches, on one core and without a GPU: ρ_s, rows moved, split heads, planning time.

worst_kv: heads whose keys the worst column is sent, over whole heads in equal numbers.

python -m scripts.bench.planner                  Wan2.1-14B's size, masks of many kinds, P = 8 and 6
python -m scripts.bench.planner --scale          planning time up to P = 128 and a million tokens (counts drawn)
python -m scripts.bench.planner --json > FILE    the same numbers for a program
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator

import numpy as np
from rich.console import Console
from rich.table import Table

from dbsp_core.layout.sequence_layout import SequenceLayout
from dbsp_core.layout.strategy import Strategy
from dbsp_core.masks.grid import BlockGrid
from dbsp_core.planning.chunks import columns_of_heads
from dbsp_core.planning.heads import contiguous_heads
from dbsp_core.planning.planners import imbalance_ratio, majority_rank, plan_rows, rho_bound, work_by_rank
from dbsp_core.sources.base import MaskRequest
from dbsp_core.sources.synthetic.source import SyntheticSource

FIELDS = ("mask", "heads", "strategy", "before", "rho", "bound", "moved", "worst_kv", "split_heads", "plan_ms")
Rows = Iterator[dict[str, object]]


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
    """Bands around the diagonal, diagonals at frame stride, and bands with dense first columns, in turn."""
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


MASKS: dict[str, Callable[[int, int, int], np.ndarray]] = {
    **{
        f"synthetic {d} ±{s}": synthetic(d, s) for d, s in ((0.2, 1.0), (0.3, 0.6), (0.4, 0.3), (0.5, 0.6), (0.7, 1.0))
    },
    "beta": beta,
    "banded": banded,
    "sinks": sinks,
    "one dense": one_dense,
}


def home_of(grid: BlockGrid, strategy: Strategy, layout: str) -> np.ndarray:
    """int64[nq]: home ring rank of each query block."""
    segments = SequenceLayout.named(layout, grid, strategy).segments(grid.q_axis)
    return majority_rank(segments.tokens_by_ring(grid.nq, strategy))


def measure(rows: np.ndarray, strategy: Strategy, layout: str, repeat: int) -> dict[str, object]:
    """One plan of int64[H, nq] dense blocks, timed `repeat` times; the shortest time stands."""
    heads, blocks = rows.shape
    grid, world = BlockGrid.uniform(blocks * 64), strategy.world
    home, times = home_of(grid, strategy, layout), []
    for _ in range(repeat):
        start = time.perf_counter()
        owner = plan_rows(rows, home, strategy.ulysses, strategy.ring)
        times.append((time.perf_counter() - start) * 1e3)
    plain = home_of(grid, strategy, "contiguous") * strategy.ulysses
    before = plain + contiguous_heads(heads, strategy.ulysses)[:, None]
    columns = columns_of_heads(owner, strategy.ulysses)
    return {
        "strategy": str(strategy),
        "before": imbalance_ratio(work_by_rank(before, rows, world)),
        "rho": imbalance_ratio(work_by_rank(owner, rows, world)),
        "bound": rho_bound(rows, world),
        "moved": float((owner // strategy.ulysses != home).mean()),
        "worst_kv": float(columns.sum(axis=0).max() / -(-heads // strategy.ulysses)),
        "split_heads": int((columns.sum(axis=1) > 1).sum()),
        "plan_ms": min(times),
    }


def masks(args: argparse.Namespace) -> Rows:
    """Every kind of mask, every head count, every strategy."""
    for name, make in MASKS.items():
        if args.mask not in name:
            continue
        for heads in args.heads:
            for seed in range(args.seeds):
                bits = make(heads, args.blocks, args.first_seed + seed)
                for strategy in (s for world in args.gpus for s in Strategy.all_for(world)):
                    found = measure(bits.sum(axis=2), strategy, args.layout, args.repeat)
                    yield {"mask": name, "heads": heads, "seed": args.first_seed + seed, **found}


def scale(args: argparse.Namespace) -> Rows:
    """Counts drawn from the product of a head's and a row's density: masks this large do not fit."""
    sizes = [(1182, world) for world in (8, 16, 32, 64, 128)] + [(blocks, 8) for blocks in (3906, 7812, 15625)]
    for blocks, world in [*sizes, (15625, 128)]:
        rng = np.random.default_rng(args.first_seed)
        density = rng.uniform(0.2, 0.6, 40)
        row = np.interp(np.linspace(0, 4, blocks), np.arange(5), rng.uniform(0.5, 1, 5))
        mean = density[:, None] * row * blocks
        rows = np.maximum(mean + rng.standard_normal(mean.shape) * np.sqrt(mean * 0.6), 0).astype(np.int64)
        for strategy in Strategy.all_for(world):
            found = measure(rows, strategy, args.layout, args.repeat)
            yield {"mask": f"{blocks * 64:,} tokens", "heads": 40, "seed": args.first_seed, **found}


def summary(found: list[dict[str, object]]) -> dict[str, dict[str, float]]:
    """The worst of each kind of strategy."""
    kinds = {"Ulysses": "R1", "ring and hybrids": ""}
    worst = {}
    for kind, ending in kinds.items():
        some = [f for f in found if str(f["strategy"]).endswith("R1") == bool(ending)]
        if some:
            worst[kind] = {key: max(float(str(f[key])) for f in some) for key in ("rho", "moved", "plan_ms")}
    return worst


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=int, nargs="+", default=[40, 12, 5, 3])
    parser.add_argument("--gpus", type=int, nargs="+", default=[8, 6])
    parser.add_argument(
        "--blocks", type=int, default=1182, help="query and KV blocks of 64 tokens; 1182 is 75,600 tokens"
    )
    parser.add_argument("--mask", default="", help="only masks whose name contains this")
    parser.add_argument("--layout", choices=["striped", "contiguous"], default="striped")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--repeat", type=int, default=5, help="plans timed; the shortest time stands")
    parser.add_argument("--scale", action="store_true", help="planning time up to P = 128 and a million tokens")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    args = parser.parse_args()

    log = Console(stderr=True)
    found = []
    for one in scale(args) if args.scale else masks(args):
        found.append(one)
        log.print(f"{one['mask']}, {one['heads']} heads, {one['strategy']}: ρ_s {one['rho']:.5f}", highlight=False)
    if args.json:
        print(json.dumps({"plans": found, "worst": summary(found)}, indent=1))
        return
    table = Table(*FIELDS, title=f"planner dbsp, {args.layout} layout")
    for one in found:
        shares = {"moved": f"{one['moved']:.2%}"}
        ratios = {key: f"{one[key]:.4f}" for key in ("before", "rho", "bound", "worst_kv")}
        shown = {**one, **shares, **ratios, "plan_ms": f"{one['plan_ms']:.2f}"}
        table.add_row(*(str(shown[field]) for field in FIELDS))
    console = Console(width=max(110, Console().width))
    console.print(table)
    for kind, worst in summary(found).items():
        console.print(f"worst, {kind}: ρ_s {worst['rho']:.5f}, moved {worst['moved']:.2%}, {worst['plan_ms']:.2f} ms")


if __name__ == "__main__":
    main()
