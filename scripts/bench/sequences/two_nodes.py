"""A step over two nodes with a slow link between them: bags of a node, and one bag of all ranks. Measured.

    python -m scripts.bench.sequences.two_nodes [--rates 50mbit 1gbit] [--ranks-per-node 2] [--steps 3]

Each node is a network namespace (needs root, ip and tc); its ranks (gloo, one thread each) reach the other's only by
the link. Ways take turns. Bytes are of a forward pass: what the kernel has counted on the link in one direction of
each node, and what the plans come to. Times are of forward and backward.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import dbsp_diffusers
from dbsp_core import Plan, SequenceLayout
from dbsp_core.cost.prediction import traffic_of
from dbsp_diffusers import LocalPredictions, PackedSample, packed_forward_local
from scripts.bench.nodes import NODES, add_rank_options, run_on_two_nodes, sent_bytes
from scripts.reproduce.knapformer.counted import moved_tokens
from scripts.results.result import FOLDER, print_table, write_csv
from tests.support.oracle import largest_difference

HEADS, WIDTH, LAYERS, PROMPT, TEXT, CHANNELS = 8, 32, 4, 16, 32, 16
LOADERS = (((6, 16, 24),), ((1, 16, 24),) * 3, ((3, 16, 24), (1, 12, 16)), ((1, 24, 24),) * 2)
"""Token grids that ranks load one after another; with the numbers of a step they go round."""
MASK = {"source": "synthetic", "density": 0.3, "block_q": 64, "block_k": 64}


@dataclass(frozen=True)
class Row:
    """One way at one rate. Bytes are over the link, both directions together, of a forward pass; seconds of a step,
    the median; ratio: of each turn's time to that of bags of a node, the median"""

    rate: str
    bags: str
    counted_bytes: int
    network_bytes: int
    seconds: float
    ratio: float
    differs: str


def main() -> None:
    """Starts the nodes at every rate, and prints and writes what they measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", nargs="+", default=["50mbit", "1gbit"], help="of the link, as tc writes them")
    parser.add_argument("--ranks-per-node", type=int, default=2)
    parser.add_argument("--steps", type=int, default=3, help="measured each way, after one that is not")
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder for the CSV")
    add_rank_options(parser)
    args = parser.parse_args()
    if args.rank is not None:
        return run_rank(args.rank, args.ranks_per_node, args.link, args.store, args.steps)
    rows = []
    for rate in args.rates:
        answer = run_on_two_nodes(__spec__.name, rate, args.ranks_per_node, "--steps", str(args.steps))
        rows += [Row(rate, **way) for way in json.loads(answer)]
    print_table("A step over two nodes", write_csv("bags-two-nodes", rows, args.out))


def run_rank(rank: int, ranks_per_node: int, link: str, store: str, steps: int) -> None:
    """In a namespace: both ways one after another. Rank 0 prints what was found."""
    from diffusers import WanTransformer3DModel

    torch.set_num_threads(1)
    world = NODES * ranks_per_node
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    torch.manual_seed(0)
    transformer = WanTransformer3DModel(
        num_attention_heads=HEADS,
        attention_head_dim=WIDTH,
        in_channels=CHANNELS,
        out_channels=CHANNELS,
        text_dim=TEXT,
        freq_dim=64,
        ffn_dim=4 * HEADS * WIDTH,
        num_layers=LAYERS,
    ).train()
    dbsp_diffusers.enable(transformer, {"mask": MASK})
    ways = (f"g{ranks_per_node}n{NODES}", f"g{world}n1")
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    found: dict[str, dict[str, Any]] = {}
    samples = _samples(rank)
    for turn in range(steps + 1):
        for way in ways[turn % 2 :] + ways[: turn % 2]:
            transformer.zero_grad()
            dist.barrier()
            start = time.perf_counter()
            predictions = packed_forward_local(transformer, samples, bags=way)
            loss = sum(((one**2).mean() for one in predictions.samples), predictions.zero)
            loss.backward()
            dist.barrier()
            if turn:
                seconds[way].append(time.perf_counter() - start)
    for way in ways:
        found[way] = _bytes_of(transformer, samples, way, rank, ranks_per_node, link)
    base = np.array(seconds[ways[0]])
    expected = found[ways[0]].pop("outputs")
    rows = []
    for way in ways:
        own = zip(found[way].pop("outputs", expected), expected, strict=True)
        differs = torch.tensor(max((largest_difference(a, b) for a, b in own), default=0.0))
        dist.all_reduce(differs, op=dist.ReduceOp.MAX)
        times = np.array(seconds[way])
        medians = {"seconds": float(np.median(times)), "ratio": float(np.median(times / base))}
        rows.append({"bags": way, **found[way], **medians, "differs": f"{float(differs):.0e}"})
    if rank == 0:
        print(json.dumps(rows), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def _samples(rank: int) -> list[PackedSample]:
    draws = torch.Generator().manual_seed(rank)
    made = []
    for t, h, w in LOADERS[rank % len(LOADERS)]:
        latents = torch.randn(CHANNELS, t, 2 * h, 2 * w, generator=draws)
        made.append(PackedSample(latents, 500.0, torch.randn(PROMPT, TEXT, generator=draws)))
    return made


def _bytes_of(
    transformer: Any, samples: Sequence[PackedSample], way: str, rank: int, ranks_per_node: int, link: str
) -> dict[str, Any]:
    """Bytes between the nodes in a forward pass: counted on its plans, and by the kernel."""
    dist.barrier()
    before = sent_bytes(link)
    with torch.no_grad():
        predictions = packed_forward_local(transformer, samples, bags=way)
    dist.barrier()
    sent = torch.tensor(sent_bytes(link) - before if rank % ranks_per_node == 0 else 0.0, dtype=torch.float64)
    dist.all_reduce(sent)
    counted = _counted(predictions, ranks_per_node)
    return {"counted_bytes": counted, "network_bytes": int(sent), "outputs": predictions.samples}


def _counted(predictions: LocalPredictions, ranks_per_node: int) -> int:
    """Hidden states there and predictions back, prompts and timesteps, and the exchanges of a bag over both nodes."""
    plan, session = predictions.plan, predictions.session
    assert plan is not None
    world = plan.topology.world
    loader = np.repeat(np.arange(world), [len(LOADERS[rank % len(LOADERS)]) for rank in range(world)])
    _, apart = moved_tokens(plan.runs, loader, ranks_per_node)
    total = apart * 4 * (HEADS * WIDTH + 4 * CHANNELS)
    pairs = set(zip(plan.runs.sequence.tolist(), plan.runs.rank.tolist(), strict=True))
    away = sum(loader[sequence] // ranks_per_node != rank // ranks_per_node for sequence, rank in pairs)
    total += away * (4 * PROMPT * TEXT + 8)
    if session is not None and len(plan.topology.ranks) == 1:
        total += sum(crossing_bytes(one, session.layout, ranks_per_node, WIDTH) for one in session.records.values())
    return int(total)


def crossing_bytes(
    plan: Plan, layout: SequenceLayout, ranks_per_node: int, head_dim: int, element_bytes: int = 4
) -> float:
    """Returns the bytes that a call sends between both nodes, counted on the plan."""
    traffic = traffic_of(plan, layout)
    node = torch.arange(plan.strategy.world).numpy() // ranks_per_node
    apart = node[:, None] != node
    tokens = sum(float(sent[apart].sum()) for sent in (traffic.queries, *(2 * traffic.keys)))
    out = float(traffic.queries[apart.T].sum()) * head_dim * element_bytes
    return out + tokens * plan.comm_dtype.token_bytes(head_dim, element_bytes)


if __name__ == "__main__":
    main()
