"""Two nodes in network namespaces with a slow link between them: bytes on the wire, and time, of keys that go round
the ring against needed keys. Measured; needs root and the commands ip and tc.

    python -m scripts.bench.needed_keys [--rate 400mbit] [--ranks-per-node 2] [--json]

Each node is a namespace; its ranks (gloo, one thread each) reach the other's only by the link. Bytes are what the
kernel has counted on it in one direction of each node, over the same calls that are timed; those expected are counted
on the plan. Frames carry 64 kB, so that headers are a thousandth.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from dbsp_core import DualBalancedAttention, SequenceGroup, SequenceLayout, Strategy, make_plan
from dbsp_core.cost.comm_volume import traffic_of
from dbsp_core.masks.block_mask import BlockMask
from dbsp_core.planning.plan import Plan
from dbsp_core.sources import MaskRequest, WindowSource
from scripts.bench.nodes import NODES, add_rank_options, run_on_two_nodes, sent_bytes

HEADS, WIDTH, CALLS = 8, 64, 3
REQUEST = MaskRequest(0, HEADS, (12, 16, 24))
SOURCE = WindowSource(window=(3, 7, 9), block_q=64, block_k=64)


def main() -> None:
    """Starts the nodes, and prints what they measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", default="400mbit", help="of the link, as tc writes it")
    parser.add_argument("--ranks-per-node", type=int, default=2)
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    add_rank_options(parser)
    args = parser.parse_args()
    if args.rank is not None:
        return run_rank(args.rank, args.ranks_per_node, args.link, args.store)
    found = measure(args.rate, args.ranks_per_node)
    if args.json:
        print(json.dumps({"rate": args.rate, "ways": found}))
        return
    print(f"two nodes of {args.ranks_per_node} ranks, {args.rate} between them; measured, per call")
    for way in found:
        counted, wire = way["counted_bytes"] / 1e6, way["wire_bytes"] / 1e6
        print(
            f"{way['way']:24s} {way['seconds'] * 1e3:8.1f} ms   over the link: counted {counted:7.3f} MB, "
            f"on the wire {wire:7.3f} MB ({wire / counted - 1:+.2%})   error {way['error']:.1e}"
        )


def measure(rate: str, ranks_per_node: int) -> list[dict[str, Any]]:
    """By way, what all ranks found; raises RuntimeError where a rank failed."""
    found: list[dict[str, Any]] = json.loads(run_on_two_nodes(__spec__.name, rate, ranks_per_node))
    return found


def run_rank(rank: int, ranks_per_node: int, link: str, store: str) -> None:
    """In a namespace: every way in turn. Rank 0 prints what was found."""
    torch.set_num_threads(1)
    world = NODES * ranks_per_node
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    mask, found = SOURCE.mask(REQUEST), []
    generator = torch.Generator().manual_seed(0)
    full = [torch.randn(1, HEADS, REQUEST.tokens, WIDTH, generator=generator) for _ in range(3)]
    expected = _expected(full, mask)
    for way, plan, layout in ways(mask, world, ranks_per_node):
        found.append({"way": way, **_one_way(mask, plan, layout, (full, expected), rank, ranks_per_node, link)})
    if rank == 0:
        print(json.dumps(found), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def ways(mask: BlockMask, world: int, ranks_per_node: int) -> Iterator[tuple[str, Plan, SequenceLayout]]:
    """Keys round the ring in their own layout and needed keys in theirs: heads inside a node, and on single ranks."""
    for strategy in dict.fromkeys((Strategy(ranks_per_node, NODES), Strategy(1, world), Strategy(world, 1))):
        for keys in ("ring", "needed"):
            layout = SequenceLayout.named("contiguous" if keys == "needed" else "striped", mask.grid, strategy)
            yield f"{strategy} {keys}", make_plan(mask, strategy, layout=layout, compare=False, keys=keys), layout


def _one_way(
    mask: BlockMask,
    plan: Plan,
    layout: SequenceLayout,
    tensors: tuple[Sequence[torch.Tensor], torch.Tensor],
    rank: int,
    ranks_per_node: int,
    link: str,
) -> dict[str, Any]:
    """tensors: q, k and v of all tokens, and what attention makes of them in one process"""
    full, expected = tensors
    token, place = (torch.from_numpy(one) for one in layout.tokens_at(rank))
    local = [torch.zeros(1, HEADS, layout.shard, WIDTH) for _ in full]
    for shard, whole in zip(local, full, strict=True):
        shard[:, :, place] = whole[:, :, token]
    attend = DualBalancedAttention.prepare(plan, mask, layout, SequenceGroup.of())
    out = attend(*local)  # what ranks compare at their first call is over
    dist.barrier()
    before, start = sent_bytes(link), time.perf_counter()
    for _ in range(CALLS):
        attend(*local)
    seconds = time.perf_counter() - start
    dist.barrier()
    wire = torch.tensor([sent_bytes(link) - before if rank % ranks_per_node == 0 else 0.0, 0.0], dtype=torch.float64)
    wire[1] = seconds if rank == 0 else 0.0
    dist.all_reduce(wire)
    error = torch.tensor([float((out[:, :, place] - expected[:, :, token]).abs().max())])
    dist.all_reduce(error, op=dist.ReduceOp.MAX)
    return {
        "seconds": float(wire[1]) / CALLS,
        "wire_bytes": float(wire[0]) / CALLS,
        "counted_bytes": crossing_bytes(plan, layout, ranks_per_node, WIDTH),
        "error": float(error),
    }


def _expected(full: Sequence[torch.Tensor], mask: BlockMask) -> torch.Tensor:
    q, k, v = full
    lengths = [torch.from_numpy(axis.lengths) for axis in (mask.grid.q_axis, mask.grid.k_axis)]
    allowed = mask.bits.repeat_interleave(lengths[0], 1).repeat_interleave(lengths[1], 2)
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, allowed)


def crossing_bytes(
    plan: Plan, layout: SequenceLayout, ranks_per_node: int, head_dim: int, element_bytes: int = 4
) -> float:
    """What a call sends from either node to the other, both together, counted on the plan."""
    traffic, strategy = traffic_of(plan.assignment, layout), plan.strategy
    node = torch.arange(strategy.world).numpy() // ranks_per_node
    apart = node[:, None] != node
    tokens = sum(float(sent[apart].sum()) for sent in (traffic.queries, *traffic.key_exchanges))
    for rank in range(strategy.world):  # what rank (r, u) is handed on comes from (r + 1, u)
        ring_rank, column = divmod(rank, strategy.ulysses)
        source = (ring_rank + 1) % strategy.ring * strategy.ulysses + column
        tokens += float(apart[rank, source] * traffic.handed_on[rank])
    out = float(traffic.combine[apart].sum()) * head_dim * element_bytes
    return out + tokens * plan.assignment.wire.token_bytes(head_dim, element_bytes)


if __name__ == "__main__":
    main()
