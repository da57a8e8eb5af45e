"""Two nodes with a slow link between them: queries, keys and values as the model has them, against int8. Measured.

    python -m scripts.bench.wire.two_nodes [--rates 50mbit 1gbit] [--ranks-per-node 1] [--turns 5]

Each node is a network namespace (needs root, ip and tc); its ranks (gloo, one thread each) reach the other's only by
the link. q, k and v are bfloat16. Ways take turns, and a turn's times are compared with one another. Bytes are of one
attention, both directions together: what the kernel has counted on the link, and what the plans come to.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from dbsp_core import BlockMask, DualBalancedAttention, SequenceGroup, SequenceLayout, Strategy, make_plan
from dbsp_core.comm.token_mean import mean_bytes
from dbsp_core.planning.wire_format import MODEL, WIRE_FORMATS
from dbsp_core.sources import MaskRequest, WindowSource
from scripts.bench.needed_keys import crossing_bytes
from scripts.bench.nodes import NODES, add_rank_options, run_on_two_nodes, sent_bytes
from scripts.results.result import FOLDER, write_csv

HEADS, WIDTH = 8, 128
REQUEST = MaskRequest(0, HEADS, (12, 16, 24))
SOURCE = WindowSource(window=(3, 5, 7), block_q=64, block_k=64)


@dataclass(frozen=True)
class Row:
    """One precision with one strategy at one rate. seconds: of an attention, the median; ratio: of each turn's time to
    that in the model's precision, the median; error: relative, of the output, against one process in float64"""

    rate: str
    strategy: str
    precision: str
    counted_bytes: int
    wire_bytes: int
    seconds: float
    ratio: float
    error: str


def main() -> None:
    """Starts the nodes at every rate, and prints and writes what they measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", nargs="+", default=["50mbit", "1gbit"], help="of the link, as tc writes them")
    parser.add_argument("--ranks-per-node", type=int, default=1)
    parser.add_argument("--turns", type=int, default=5, help="measured each way, after one that is not")
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder for the CSV")
    add_rank_options(parser)
    args = parser.parse_args()
    if args.rank is not None:
        return run_rank(args.rank, args.ranks_per_node, args.link, args.store, args.turns)
    rows = []
    for rate in args.rates:
        answer = run_on_two_nodes(__spec__.name, rate, args.ranks_per_node, "--turns", str(args.turns))
        rows += [Row(rate, **way) for way in json.loads(answer)]
    for row in rows:
        print(
            f"{row.rate:>8s} {row.strategy:5s} {row.precision:6s} over the link: counted "
            f"{row.counted_bytes / 1e6:7.3f} MB, on the wire {row.wire_bytes / 1e6:7.3f} MB; "
            f"{row.seconds:7.3f} s ({row.ratio:.2f}×); error {row.error}"
        )
    write_csv("int8-two-nodes", rows, args.out)


def run_rank(rank: int, ranks_per_node: int, link: str, store: str, turns: int) -> None:
    """In a namespace: all ways in turn. Rank 0 prints what was found."""
    torch.set_num_threads(1)
    world, mask = NODES * ranks_per_node, SOURCE.mask(REQUEST)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    rows = []
    for strategy in (Strategy(world, 1), Strategy(1, world)):
        rows += _both(mask, strategy, rank, ranks_per_node, link, turns)
    if rank == 0:
        print(json.dumps(rows), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def _both(
    mask: BlockMask, strategy: Strategy, rank: int, ranks_per_node: int, link: str, turns: int
) -> list[dict[str, Any]]:
    layout = SequenceLayout.striped(mask.grid, strategy)
    token, place = (torch.from_numpy(one) for one in layout.tokens_at(rank))
    draws = torch.Generator().manual_seed(0)
    full = [torch.randn(1, HEADS, REQUEST.tokens, WIDTH, generator=draws).bfloat16() for _ in range(3)]
    expected = _attention(full, mask)[:, :, token]
    local = [torch.zeros(1, HEADS, layout.shard, WIDTH, dtype=torch.bfloat16) for _ in full]
    for shard, whole in zip(local, full, strict=True):
        shard[:, :, place] = whole[:, :, token]
    plans = {name: make_plan(mask, strategy, layout=layout, compare=False, precision=name) for name in WIRE_FORMATS}
    ways = {
        name: DualBalancedAttention.prepare(plan, mask, layout, SequenceGroup.of()) for name, plan in plans.items()
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    found: dict[str, dict[str, Any]] = {}
    for turn in range(turns + 1):
        for name in list(ways)[turn % 2 :] + list(ways)[: turn % 2]:
            dist.barrier()
            before, start = sent_bytes(link), time.perf_counter()
            out = ways[name](*local)
            dist.barrier()
            if turn:
                seconds[name].append(time.perf_counter() - start)
            crossed = sent_bytes(link) - before if rank % ranks_per_node == 0 else 0.0
            off = (out[:, :, place].double() - expected).norm() ** 2, expected.norm() ** 2
            sums = torch.tensor([crossed, *map(float, off)], dtype=torch.float64)
            dist.all_reduce(sums)
            found[name] = {"wire_bytes": int(sums[0]), "error": f"{float((sums[1] / sums[2]) ** 0.5):.1e}"}
    base = np.array(seconds[MODEL.name])
    rows = []
    for name, plan in plans.items():
        counted = crossing_bytes(plan, layout, ranks_per_node, WIDTH, element_bytes=2)
        if plan.assignment.wire.centred:
            counted += ranks_per_node * NODES * mean_bytes(1, HEADS, WIDTH, 1 + ranks_per_node)
        times = np.array(seconds[name])
        medians = {"seconds": float(np.median(times)), "ratio": float(np.median(times / base))}
        rows.append(
            {"strategy": str(strategy), "precision": name, "counted_bytes": int(counted), **found[name], **medians}
        )
    return rows


def _attention(full: list[torch.Tensor], mask: BlockMask) -> torch.Tensor:
    q, k, v = (t.double() for t in full)
    lengths = [torch.from_numpy(axis.lengths) for axis in (mask.grid.q_axis, mask.grid.k_axis)]
    allowed = mask.bits.repeat_interleave(lengths[0], 1).repeat_interleave(lengths[1], 2)
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, allowed)


if __name__ == "__main__":
    main()
