"""MiniMax-H3's attention on 16 GPUs (vLLM-Omni #7589), modelled: dense as vLLM-Omni runs or proposes it, and VSA.

VSA keeps as many tiles in every row, so its work is counted without a mask. Predicting the mask, the coarse branch and
the gate are not in these seconds: each rank computes its share of them under every strategy.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from dbsp_core.cost.machine import Hardware, load_hardware
from dbsp_core.cost.prediction import AttentionShape, predict, traffic_of
from dbsp_core.layout.sequence_layout import SequenceLayout
from dbsp_core.masks.grid import BlockGrid
from dbsp_core.planning.plan import Plan, plan_from_counts
from dbsp_core.sources import MaskRequest, VsaSource
from scripts.reproduce.lockstep import nodes_of
from scripts.results.result import FOLDER, print_table, write_csv

HEADS, HEAD_DIM, GPUS = 56, 128, 16
THW, TEXT = (52, 48, 84), (300, 212)
"""Video of 209,664 tokens, as #7589 has it: 52 latent frames of 1344 × 768; text, and audio, are assumed."""


@dataclass(frozen=True)
class Way:
    """One way of 16 GPUs.

    Attributes:
        by: Who runs it, or proposes it.
        heads: Of the plan: with those that are padded.
        gathered: Whether all keys and values are there before the one kernel starts.
    """

    by: str
    name: str
    strategy: str
    planner: str = "contiguous"
    heads: int = HEADS
    gathered: bool = False


DENSE = (
    Way("vLLM-Omni #7641", "Ulysses 8 × AllGather-KV 2", "U8R2", gathered=True),
    Way("vLLM-Omni 0.30", "Ulysses 8 × ring 2", "U8R2"),
    Way("vLLM-Omni 0.30", "Ulysses 16 (UAA), heads padded to 64", "U16R1", heads=64),
)
SPARSE = (
    Way("asked for in #7589", "Ulysses 8 × AllGather-KV 2", "U8R2", gathered=True),
    Way("db-SP", "U8R2", "U8R2", planner="dbsp"),
    Way("db-SP", "U16R1", "U16R1", planner="dbsp"),
)


@dataclass(frozen=True)
class Row:
    """One way on one machine.

    Attributes:
        kept: Share of a video row's tiles.
        rho: Work of the slowest rank over the mean.
        network_mb: What the rank that receives most gets from the other node in one attention, in MB; counted.
        attention_ms: Of one layer, modelled.
        over_7641: How many times as fast as dense Ulysses 8 × AllGather-KV 2.
    """

    machine: str
    attention: str
    kept: float
    by: str
    way: str
    rho: float
    network_mb: float
    attention_ms: float
    over_7641: float
    label: str = "modelled; MB and rho counted"


def grid_and_rows(kept: float) -> tuple[BlockGrid, np.ndarray]:
    """Returns the grid, and int64[nq], the key blocks of each row: all of text, and this share of the video's."""
    grid = VsaSource().grid(MaskRequest(0, HEADS, THW, sum(TEXT), text_runs=TEXT))
    text = int((grid.k_axis.starts < grid.text_tokens).sum())
    rows = np.full(grid.nq, text + math.ceil(kept * (grid.nk - text)))
    rows[:text] = grid.nk
    return grid, rows


def plan_of(way: Way, kept: float) -> Plan:
    grid, rows = grid_and_rows(kept)
    return plan_from_counts(np.tile(rows, (way.heads, 1)), grid, way.strategy, way.planner)


def seconds(way: Way, plan: Plan, hardware: Hardware) -> float:
    """Returns the modelled seconds of one attention."""
    if way.gathered:  # nothing hides the gathering, and there is nothing to merge
        known = replace(hardware.constants, overlap=0.0, merge_bytes_per_s=math.inf)
        hardware = replace(hardware, constants=known)
    shape = AttentionShape(1, way.heads, HEAD_DIM)
    return predict(plan, shape, hardware, nodes_of(hardware, GPUS)).total_s


def network_bytes(plan: Plan, hardware: Hardware) -> float:
    """Returns the bytes that the rank which receives most gets from other nodes: q, k, v, and outputs."""
    traffic = traffic_of(plan, SequenceLayout.contiguous(plan.grid.tokens, GPUS))
    nodes = nodes_of(hardware, GPUS)
    sent = traffic.queries + traffic.queries.T + 2 * traffic.keys.sum(axis=0)
    apart = np.not_equal.outer(nodes, nodes)
    return float((sent * apart).sum(axis=0).max()) * HEAD_DIM * 2


def measure(machines: tuple[str, ...]) -> Iterator[Row]:
    for machine in machines:
        hardware, reference = load_hardware(machine), 0.0
        cases = [("dense", 1.0, DENSE), ("VSA, sparsity 0.8", 0.2, SPARSE), ("VSA, sparsity 0.9", 0.1, SPARSE)]
        for attention, kept, ways in cases:
            for way in ways:
                plan = plan_of(way, kept)
                took = seconds(way, plan, hardware)
                reference = took if way.by.endswith("#7641") else reference
                mb, over = network_bytes(plan, hardware) / 1e6, reference / took
                yield Row(machine, attention, kept, way.by, way.name, plan.rho, mb, took * 1e3, over)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hardware", nargs="+", default=["h100", "h800"], help="shipped machines, or hardware files")
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder for the CSV")
    options = parser.parse_args()
    print_table("MiniMax-H3 on 16 GPUs", write_csv("h3", list(measure(tuple(options.hardware))), options.out))


if __name__ == "__main__":
    main()
