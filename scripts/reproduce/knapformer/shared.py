"""KnapFormer's numbers and streams, and what all its reproductions draw and cost."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

import numpy as np

from dbsp_core.cost.sequences import FLUX
from dbsp_core.planning.sequences.bags import BagTopology
from dbsp_core.planning.sequences.cost import SequenceCost
from dbsp_core.planning.sequences.sequence_plan import SequencePlan, plan_sequences
from dbsp_core.planning.sequences.streams import DrawnSequences, StreamAssumptions, draw, parse_streams
from scripts.reproduce.common import RESULTS

WORLD, NODE, BLOCK = 32, 8, 64
ASSUMPTIONS = StreamAssumptions()
MIXED = "mixed-resolution images"
STREAMS = {
    "low-resolution images": "g32b32i256f1s0",
    MIXED: "g16b4i256f1s0,g4b5i512f1s0,g4b5i1024f1s0,g8b1i2048f1s0",
    "images and videos": (
        "g8b4i256f1s0,g2b5i512f1s0,g2b5i1024f1s0,g4b1i2048f1s0,g1b10i256f4s0,g3b1i512f4s0,g8b2i256f85s1,g4b1i512f85s1"
    ),
}
"""Table 1's. Of the third the text we have shows the images' codes only; the rest are the published program's."""
PAPER_WIR = {
    "low-resolution images": {"none": 1.22, "g1n32": 1.00, "g2n16": 1.00, "g4n8": 1.00, "g8n4": 1.00},
    MIXED: {"none": 17.14, "g1n32": 3.92, "g2n16": 1.27, "g4n8": 1.01, "g8n4": 1.00},
}
TOPOLOGIES = {"none": "g1n1", "g1n32": "g1n32", "g2n16": "g2n16", "g4n8": "g4n8", "g8n4": "g8n4"}


def knapformer_arguments(description: str | None, draws: int) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=description, formatter_class=partial(argparse.ArgumentDefaultsHelpFormatter, width=100)
    )
    parser.add_argument("--draws", type=int, default=draws, help="steps' sequences to draw")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the CSV and the PNG")
    return parser


def drawn(stream: str, seed: int) -> DrawnSequences:
    return draw(parse_streams(STREAMS[stream]), WORLD, seed, ASSUMPTIONS)


def pair_cost(gamma: float) -> SequenceCost:
    """KnapFormer's Eq. 2: token pairs, not blocks."""
    return SequenceCost.gamma_corrected(FLUX.width, gamma)


def share_out(sequences: DrawnSequences, gamma: float, bags: str, balancer: str) -> tuple[SequencePlan, np.ndarray]:
    """A plan by Eq. 2, and int64[n], what each sequence costs by it."""
    tokens = sequences.tokens
    cost = pair_cost(gamma).picoseconds(tokens, tokens**2)
    plan = plan_sequences(cost, tokens, sequences.loader, BagTopology.parse(TOPOLOGIES[bags], WORLD), balancer)
    return plan, cost


def loads(plan: SequencePlan, cost: np.ndarray) -> np.ndarray:
    """float64[world]: each rank's cost as KnapFormer counts it, its bag's over the bag's ranks."""
    topology = plan.topology
    return np.repeat(np.bincount(plan.bag, cost, len(topology.ranks)) / topology.ranks, topology.ranks)
