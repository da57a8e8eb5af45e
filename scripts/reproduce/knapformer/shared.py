"""KnapFormer's numbers and streams, and the draws and costs of all its reproductions."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace

import numpy as np

from dbsp_core.cost.sequence_cost import LayerSize, SequenceWork
from dbsp_core.masks.grid import BlockGrid
from dbsp_core.planning.bags import BagTopology
from dbsp_core.planning.planners import contiguous_heads
from dbsp_core.planning.sequences import SequenceCost, SequencePlan, TokenRuns, plan_sequences
from examples.data_codes import DrawnSequences, draw, parse_streams
from scripts.reproduce.knapformer.counted import SequencePlanMetrics, balanced_owners, evaluate, gamma_corrected
from scripts.results.colours import PLANNERS
from scripts.results.result import arguments

WORLD, BLOCK = 32, 64
LAYERS, WIDTH = 57, 3072
FLUX = LayerSize(heads=24, head_dim=128, token_flops=24 * WIDTH**2)
"""KnapFormer's model (Table 1): 19 double-stream and 38 single-stream blocks, 24·d² FLOP a token in each (Eq. 1)."""
GAMMA = 0.4  # of Eq. 2: what the example in the README of KnapFormer's program runs with
FLOPS_PER_S = 1e15  # scales all costs equally
MIXED = "mixed-resolution images"
STREAMS = {
    "low-resolution images": "g32b32i256f1s0",
    MIXED: "g16b4i256f1s0,g4b5i512f1s0,g4b5i1024f1s0,g8b1i2048f1s0",
    "images and videos": (
        "g8b4i256f1s0,g2b5i512f1s0,g2b5i1024f1s0,g4b1i2048f1s0,g1b10i256f4s0,g3b1i512f4s0,g8b2i256f85s1,g4b1i512f85s1"
    ),
}
"""Table 1's. Of the third the text we have shows the images' codes only; the rest are the published program's."""


@dataclass(frozen=True)
class PaperRow:
    """fbl_s: a step's forward and backward;  tps: tokens a second, all GPUs;  hfu: share of their peak FLOP"""

    wir: float
    fbl_s: float
    tps: float
    hfu: float


TABLE_1 = {
    "low-resolution images": {
        "none": PaperRow(1.22, 3.13, 147.63e3, 0.2472),
        "g1n32": PaperRow(1.00, 2.95, 156.48e3, 0.2620),
        "g2n16": PaperRow(1.00, 3.30, 139.77e3, 0.2340),
        "g4n8": PaperRow(1.00, 3.51, 131.63e3, 0.2204),
        "g8n4": PaperRow(1.00, 4.30, 107.28e3, 0.1796),
    },
    MIXED: {
        "none": PaperRow(17.14, 4.64, 58.58e3, 0.1454),
        "g1n32": PaperRow(3.92, 4.62, 58.95e3, 0.1463),
        "g2n16": PaperRow(1.27, 2.92, 93.08e3, 0.2310),
        "g4n8": PaperRow(1.01, 2.62, 103.74e3, 0.2574),
        "g8n4": PaperRow(1.00, 2.52, 108.06e3, 0.2681),
    },
}
COLOURS = {
    "as loaded": PLANNERS["contiguous"],
    "KnapFormer's, rebuilt": "#8c6bb1",
    "dbsp": PLANNERS["dbsp"],
}
"""By who shares sequences out."""
TOPOLOGIES = {"none": "g1n1", "g1n32": "g1n32", "g2n16": "g2n16", "g4n8": "g4n8", "g8n4": "g8n4"}


def knapformer_arguments(description: str | None) -> argparse.ArgumentParser:
    parser = arguments(description)
    parser.add_argument("--draws", type=int, default=20, help="steps' sequences to draw")
    return parser


def drawn(stream: str, seed: int) -> DrawnSequences:
    return draw(parse_streams(STREAMS[stream]), WORLD, seed)


def pair_cost() -> SequenceCost:
    """KnapFormer's Eq. 2: token pairs, not blocks."""
    return gamma_corrected(WIDTH, GAMMA, FLOPS_PER_S)


def distribute(sequences: DrawnSequences, bags: str, balancer: str) -> tuple[SequencePlan, np.ndarray]:
    """A plan by Eq. 2, and int64[n], what each sequence costs by it."""
    tokens = sequences.tokens
    cost = pair_cost().picoseconds(tokens, tokens**2)
    return planned(cost, sequences, bags, balancer), cost


def planned(cost: np.ndarray, sequences: DrawnSequences, bags: str, balancer: str) -> SequencePlan:
    """A plan, in KnapFormer's chunks for "knapsack". cost: int64[n], picoseconds of each sequence."""
    tokens, topology = sequences.tokens, BagTopology.parse(TOPOLOGIES[bags], WORLD)
    plan = plan_sequences(cost, tokens, sequences.loader, topology)
    return replace(plan, runs=chunks(tokens, plan.bag, topology)) if balancer == "knapsack" else plan


def chunks(tokens: np.ndarray, bag: np.ndarray, topology: BagTopology) -> TokenRuns:
    """Cuts as KnapFormer does (§3.3, second pass): sequences in even contiguous chunks, one for each rank of a bag.

    Remaining tokens go one each to ranks of the bag, round-robin. `tokens` and `bag` are int64[n].
    """
    sizes = topology.ranks[bag]
    over = tokens % sizes
    # 1. Whose turn it is: the tokens left over by the bag's sequences before this one.
    order = np.argsort(bag, kind="stable")
    before = np.empty_like(over)
    running = np.cumsum(over[order]) - over[order]
    first_of_bag = np.searchsorted(bag[order], bag[order])
    before[order] = running - running[first_of_bag]
    # 2. Chunk k of every sequence.
    sequence = np.repeat(np.arange(len(tokens)), sizes)
    k = np.arange(len(sequence)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    turn = (k - before[sequence]) % sizes[sequence]
    length = tokens[sequence] // sizes[sequence] + (turn < over[sequence])
    start = np.cumsum(length) - length
    start -= np.repeat(np.cumsum(tokens) - tokens, sizes)
    return TokenRuns.sorted(sequence, start, length, topology.first_rank[bag[sequence]] + k)


def whole_heads(rows: np.ndarray, grids: list[BlockGrid], ranks: int) -> np.ndarray:
    """Returns int64[H, nq], the rank of a bag that computes each row: KnapFormer's ranks have runs of whole heads."""
    return np.broadcast_to(contiguous_heads(len(rows), ranks)[:, None], rows.shape)


def loads(plan: SequencePlan, cost: np.ndarray) -> np.ndarray:
    """float64[world]: each rank's cost as KnapFormer counts it, its bag's over the bag's ranks."""
    topology = plan.topology
    return np.repeat(np.bincount(plan.bag, cost, len(topology.ranks)) / topology.ranks, topology.ranks)


def dense_work(sequences: DrawnSequences) -> SequenceWork:
    text, thw = sequences.text.tolist(), sequences.thw.tolist()
    grids = [
        BlockGrid(tokens, own, BLOCK, BLOCK, tuple(size))
        for tokens, own, size in zip(sequences.tokens.tolist(), text, thw, strict=True)
    ]
    rows = tuple(np.full((FLUX.heads, grid.nq), grid.nk, dtype=np.int64) for grid in grids)
    return SequenceWork(tuple(grids), rows)


def by_ranks(
    sequences: DrawnSequences, work: SequenceWork, bags: str, balancer: str
) -> tuple[SequencePlan, SequencePlanMetrics]:
    """A plan by γ and blocks, and what it makes each rank do; picoseconds at FLOPS_PER_S."""
    pair = gamma_corrected(WIDTH, GAMMA, FLOPS_PER_S, FLUX.heads)
    cost = SequenceCost(pair.token_s, pair.block_s * BLOCK**2)
    picoseconds = cost.picoseconds(work.tokens, work.blocks)
    plan = planned(picoseconds, sequences, bags, balancer)
    owners = whole_heads if balancer == "knapsack" else balanced_owners
    return plan, evaluate(plan, work, sequences.loader, cost, FLUX, owners)
