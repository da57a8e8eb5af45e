"""Cost of predicting masks: SpargeAttn's predictor next to the attention that it is for, measured alternately.

python -m scripts.bench.sources --ranks 2        processes on gloo, one core each, and the bytes that each receives
python -m scripts.bench.sources --json           one JSON object
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist

from dbsp_core import DualBalancedAttention, SequenceGroup, SequenceLayout, Strategy, make_plan
from dbsp_core.comm.block_pooling import ShardedBlocks
from dbsp_core.masks.grid import BlockGrid
from dbsp_core.sources import LocalQK, MaskRequest, SpargeSource
from scripts.bench.timing import run_ranks
from scripts.results.result import print_table

WAN_14B = BlockGrid(75600, 0, 64, 64)
WAN_HEADS, WAN_WIDTH, WAN_BYTES = 40, 128, 2  # bfloat16


def traffic(layout: SequenceLayout, grid: BlockGrid, heads: int, width: int) -> int:
    """Bytes that the busiest rank receives for one mask: pooled blocks of its heads, and bits of other heads."""
    most, others = -(-heads // layout.world), layout.world - 1
    pooled = sum(ShardedBlocks.from_layout(layout, grid).rows) * 4 * (width + 1)
    bits = most * grid.nq * -(-grid.nk // 8)
    return most * pooled * others // layout.world + others * bits


def smooth_tokens(
    thw: tuple[int, int, int], heads: int, width: int, layout: SequenceLayout, rank: int
) -> list[torch.Tensor]:
    """q, k, v [1, H, shard, D]: waves over the video with some noise, so that blocks resemble their neighbours."""
    generator = torch.Generator().manual_seed(0)
    position = torch.stack(torch.meshgrid(*map(torch.arange, thw), indexing="ij")).reshape(3, -1).float() / 4
    mine, positions = (torch.from_numpy(a) for a in layout.tokens_at(rank))
    tensors = []
    for _ in range(3):
        waves = torch.randn(heads, width, 3, generator=generator)
        phase = 7 * torch.rand(heads, width, 1, generator=generator)
        everywhere = 1.5 * torch.sin(waves @ position + phase).transpose(1, 2)
        everywhere = everywhere + 0.3 * torch.randn(everywhere.shape, generator=generator)
        here = torch.zeros(1, heads, layout.shard, width)
        here[0, :, positions] = everywhere[:, mine]
        tensors.append(here)
    return tensors


def measure_all(rank: int, world: int, args: argparse.Namespace) -> list[dict[str, object]]:
    """Returns a row for each probability and UxRy."""
    return [measure(rank, args, cdf, strategy) for cdf in args.cdf for strategy in Strategy.all_for(world)]


def measure(rank: int, args: argparse.Namespace, cdf: float, strategy: Strategy) -> dict[str, object]:
    """Medians over repetitions of the slowest rank's time, prediction and attention alternately."""
    thw = tuple(args.thw)
    source = SpargeSource(args.block, args.block, cdf=cdf)
    request = MaskRequest(0, args.heads, thw)
    grid = source.grid(request)
    layout = SequenceLayout.striped(grid, strategy)
    q, k, v = smooth_tokens(thw, args.heads, args.head_dim, layout, rank)
    tokens = LocalQK(q, k, layout, SequenceGroup.from_group(), args.head_dim**-0.5)
    mask = source.mask(request, tokens)
    plan = make_plan(mask, strategy, layout=layout)
    attend = DualBalancedAttention.prepare(plan, mask, layout, SequenceGroup.from_group())
    predicting, attending = [], []
    for _ in range(args.repeat):
        predicting.append(slowest(lambda: source.mask(request, tokens)))
        attending.append(slowest(lambda: attend(q, k, v)))
    received = traffic(layout, grid, args.heads, args.head_dim)
    exchange = 4 * grid.tokens * args.heads * args.head_dim * q.element_size() * (args.ranks - 1) // args.ranks**2
    return {
        "strategy": str(strategy),
        "cdf": cdf,
        "density": mask.density,
        "rho_before": plan.rho_before,
        "rho": plan.rho,
        "predict_s": statistics.median(predicting),
        "attention_s": statistics.median(attending),
        "share": statistics.median(predicting) / statistics.median(attending),
        "bytes": received,
        "bytes_share": received / exchange,
    }


def slowest(function: Any) -> float:
    """Seconds, of the rank that takes longest."""
    dist.barrier()
    start = time.perf_counter()
    function()
    seconds = torch.tensor(time.perf_counter() - start)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return float(seconds)


def at_wan_size() -> list[dict[str, object]]:
    """Counted: bytes a rank receives for one mask, next to Q, K, V and the output, at Wan2.1-14B's size."""
    rows = []
    for ranks in (4, 8):
        layout = SequenceLayout.striped(WAN_14B, Strategy(1, ranks))
        received = traffic(layout, WAN_14B, WAN_HEADS, WAN_WIDTH)
        exchange = 4 * WAN_14B.tokens * WAN_HEADS * WAN_WIDTH * WAN_BYTES * (ranks - 1) // ranks**2
        rows.append({"gpus": ranks, "bytes": received, "bytes_share": received / exchange})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--head-dim", type=int, default=64, help="head dimension D")
    parser.add_argument("--thw", type=int, nargs=3, default=[13, 24, 24], help="frames, rows and columns of tokens")
    parser.add_argument("--block", type=int, default=64)
    parser.add_argument("--cdf", type=float, nargs="+", default=[0.6, 0.9])
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    args = parser.parse_args()
    (rows, *_), counted = run_ranks(measure_all, args.ranks, "cpu", args), at_wan_size()
    if args.json:
        print(json.dumps({"measured": rows, "counted": counted, "settings": vars(args)}, indent=1))
        return
    print_table(f"measured on CPU, {args.ranks} ranks of one core, float32", rows)
    print_table("counted at Wan2.1-14B's size: bytes received, and their share of Q, K, V and the output", counted)


if __name__ == "__main__":
    main()
