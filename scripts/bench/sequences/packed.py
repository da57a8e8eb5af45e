"""Packed sequences: bytes of mask bits and kernel tables beside one cube of all tokens (counted), and planning time
(measured, processor time of one core: other programs may share the machine).

python -m scripts.bench.sequences.packed                128 images of 256² to 2048² on 32 ranks in nodes of 8
python -m scripts.bench.sequences.packed --json > FILE  the same numbers for a program

A node is planned by itself, as its ranks do; "all" is one plan over every rank. Images have 16×16 pixels a token;
text lengths (uniform below 512), aspect (0.8 to 1.25) and masks (random, density around 0.4) are assumed.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from dbsp_core import BlockGrid, BlockMask, Plan, SequenceLayout, Strategy, make_plan
from dbsp_core.runtime.kernel_tables import TableLayout, table_layout

SIDES = {256: 64, 512: 32, 1024: 24, 2048: 8}
"""Images of each side."""


def images(heads: int, block: int, seed: int = 0) -> list[BlockMask]:
    draws, found = np.random.default_rng(seed), []
    for side, count in SIDES.items():
        for aspect, text in zip(draws.uniform(0.8, 1.25, count), draws.integers(1, 512, count), strict=True):
            grid = BlockGrid(int((side // 16) ** 2 * aspect) + int(text), int(text), block, block)
            level = torch.from_numpy(draws.uniform(0.0, 0.8, (heads, 1, 1)))
            found.append(BlockMask(torch.from_numpy(draws.random((heads, grid.nq, grid.nk))) < level, grid))
    return found


def by_node(masks: list[BlockMask], nodes: int) -> list[list[BlockMask]]:
    """The largest first, to the node with least so far."""
    shares: list[list[BlockMask]] = [[] for _ in range(nodes)]
    for mask in sorted(masks, key=lambda mask: -mask.grid.pairs):
        min(shares, key=lambda share: sum(one.grid.pairs for one in share)).append(mask)
    return shares


def table_bytes(plan: Plan, rank: int) -> dict[str, int]:
    """Bytes of a rank's tables of all periods, as they are kept and as a kernel reads one; and what rows as wide as
    all sequences together would take."""
    layout: TableLayout = table_layout(plan.assignment, rank)
    rows, periods = len(layout.rows), plan.strategy.ring
    of_slots = plan.assignment.blocks_by_slot(rank % plan.strategy.ulysses)
    widest = max(int(np.bincount(head, minlength=1).max()) for head, _ in of_slots)
    wide = widest + -widest % 8
    return {
        "table_bytes": periods * rows * -(-layout.width // 8),
        "expanded_bytes": rows * layout.width * 4,
        "table_bytes_of_cube": periods * rows * wide // 8,
        "expanded_bytes_of_cube": rows * wide * 4,
    }


def best_ms(masks: list[BlockMask], strategy: Strategy, repeats: int) -> tuple[Plan, dict[str, float]]:
    """Processor time. The second plan of a mask finds its blocks counted."""
    found: list[dict[str, float]] = []
    for _ in range(repeats):
        times = [time.process_time()]
        mask = BlockMask.packed(masks)
        times.append(time.process_time())
        layout = SequenceLayout.striped(mask.grid, strategy)
        times.append(time.process_time())
        make_plan(mask, strategy, layout=layout, compare=False)
        times.append(time.process_time())
        plan = make_plan(mask, strategy, layout=layout, compare=False)
        times.append(time.process_time())
        names = ("pack_ms", "layout_ms", "first_plan_ms", "plan_ms")
        found.append({name: seconds * 1e3 for name, seconds in zip(names, np.diff(times).tolist(), strict=True)})
    return plan, {name: min(one[name] for one in found) for name in found[0]}


def measure(masks: list[BlockMask], strategy: Strategy, what: str, repeats: int) -> dict[str, Any]:
    plan, times = best_ms(masks, strategy, repeats)
    grid = BlockGrid.packed([mask.grid for mask in masks])
    of_ranks = [table_bytes(plan, rank) for rank in range(strategy.world)]
    return {
        "what": what,
        "strategy": str(strategy),
        "sequences": len(masks),
        "tokens": grid.tokens,
        "rho": plan.rho,
        "mask_bytes": plan.heads * grid.pairs,
        "mask_bytes_of_cube": plan.heads * grid.nq * grid.nk,
        **{name: max(one[name] for one in of_ranks) for name in of_ranks[0]},
        **times,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=int, default=24)
    parser.add_argument("--block", type=int, default=64)
    parser.add_argument("--ranks", type=int, default=32)
    parser.add_argument("--node", type=int, default=8, help="ranks of a node")
    parser.add_argument("--repeats", type=int, default=5, help="of planning: the best counts")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    masks = images(args.heads, args.block)
    shares = by_node(masks, args.ranks // args.node)
    fullest = max(shares, key=lambda share: sum(mask.grid.pairs for mask in share))
    nodes = args.ranks // args.node
    whole = (Strategy(args.node, nodes), Strategy(args.ranks, 1))
    rows = [measure(fullest, strategy, "a node", args.repeats) for strategy in Strategy.all_for(args.node)]
    rows += [measure(masks, strategy, "all", args.repeats) for strategy in whole]
    about = {
        "bytes": "counted; tables: of the rank with most",
        "times": f"measured, processor time of one core, best of {args.repeats}",
        "heads": args.heads,
        "block": args.block,
        "images": SIDES,
    }
    if args.json:
        json.dump({"about": about, "rows": rows}, sys.stdout, indent=1)
        print()
        return
    table = Table(title=f"{args.heads} heads: bytes counted (tables: of the rank with most), ms measured on one core")
    names = ("of", "strategy", "seq.", "ρ_s", "bits MB", "cube MB", "table kB", "cube's")
    names += ("expanded MB", "cube's", "planning ms", "counting too")
    for name in names:
        table.add_column(name, justify="left" if name in ("of", "strategy") else "right")
    for row in rows:
        sizes = [f"{row[name] / 1e6:.1f}" for name in ("mask_bytes", "mask_bytes_of_cube")]
        sizes += [f"{row[name] / 1e3:.0f}" for name in ("table_bytes", "table_bytes_of_cube")]
        sizes += [f"{row[name] / 1e6:.1f}" for name in ("expanded_bytes", "expanded_bytes_of_cube")]
        head = (row["what"], row["strategy"], str(row["sequences"]), f"{row['rho']:.4f}")
        table.add_row(*head, *sizes, f"{row['plan_ms']:.1f}", f"{row['first_plan_ms']:.1f}")
    Console(width=150).print(table)


if __name__ == "__main__":
    main()
