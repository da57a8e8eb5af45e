"""Guidance parallelism next to plain sequence parallelism: bytes that a rank receives (counted), seconds (modelled).

For the self-attentions of one denoising step of Wan2.1-T2V-14B at 720p, which are two CFG passes of 40 layers.
Each way takes the UxRy that is predicted to be fastest. The outputs that ranks gather and exchange are counted, too.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from dbsp_core.cost.machine import Hardware
from dbsp_core.cost.prediction import AttentionShape, candidates, exchange_s, predict, traffic_of
from dbsp_core.layout.sequence_layout import SequenceLayout
from dbsp_core.masks.block_mask import BlockMask
from dbsp_core.models.table import MODEL_SPECS, ModelSpec
from dbsp_core.planning.plan import Plan, make_plan
from scripts.reproduce.lockstep import nodes_of
from scripts.reproduce.modelled import machine, model_masks, modelled_arguments
from scripts.results.result import print_table, write_csv

MODEL = "wan2.1-t2v-14b"
OUTPUT_BYTES = 64 * 2
"""Bytes of the transformer's output for each token: 16 channels of 2 × 2 pixels, in bfloat16."""


@dataclass(frozen=True)
class Row:
    """One way on some GPUs.

    Attributes:
        way: "all ranks": both passes one after the other; "two halves": guidance parallelism.
        received_mb: What the rank that receives most is sent in a step, in MB.
        attention_s: Seconds of a step's attentions, and of the exchange of outputs between halves.
    """

    gpus: int
    mask: str
    way: str
    strategy: str
    received_mb: float
    attention_s: float
    label: str


def measure(options: argparse.Namespace) -> Iterator[Row]:
    hardware, model = machine(options), MODEL_SPECS[MODEL]
    (sparse,) = model_masks(MODEL, options)
    dense = BlockMask.dense(model.heads, sparse.grid)
    for gpus in (2, 4, 8):
        for name, mask in (("dense", dense), (f"density {sparse.density:.2f}", sparse)):
            yield from _ways(gpus, name, mask, hardware, model)


def _ways(gpus: int, name: str, mask: BlockMask, hardware: Hardware, model: ModelSpec) -> Iterator[Row]:
    shape, nodes = AttentionShape(1, model.heads, model.head_dim), nodes_of(hardware, gpus)
    output_bytes = model.tokens * OUTPUT_BYTES
    for way, ranks, passes in (("all ranks", nodes, 2), ("two halves", nodes[: gpus // 2], 1)):
        # 1. The attentions of the passes that a rank takes part in.
        plan, attention_s = _fastest(mask, shape, hardware, ranks)
        seconds = passes * model.layers * attention_s
        received = passes * (model.layers * _received(plan, shape) + output_bytes * (1 - 1 / len(ranks)))
        # 2. The outputs that halves exchange.
        if way == "two halves":
            sent = output_bytes * np.roll(np.eye(gpus), gpus // 2, axis=1)
            seconds += exchange_s(sent, hardware.constants, nodes)
            received += output_bytes
        label = f"bytes counted, seconds modelled, {hardware.name}"
        yield Row(gpus, name, way, str(plan.strategy), received / 1e6, seconds, label)


def _fastest(mask: BlockMask, shape: AttentionShape, hardware: Hardware, nodes: Sequence[int]) -> tuple[Plan, float]:
    """Returns the plan of one attention on ranks of these nodes in the fastest UxRy, and its seconds."""
    plans = [make_plan(mask, strategy, compare=False) for strategy in candidates(len(nodes), mask.grid)]
    seconds = [predict(plan, shape, hardware, nodes).total_s for plan in plans]
    best = min(range(len(plans)), key=seconds.__getitem__)
    return plans[best], seconds[best]


def _received(plan: Plan, shape: AttentionShape) -> float:
    """Bytes that the rank which receives most is sent in one attention: q, k, v and the output."""
    traffic = traffic_of(plan, SequenceLayout.contiguous(plan.grid.tokens, plan.strategy.world))
    sent = traffic.queries + traffic.queries.T + 2 * traffic.keys.sum(axis=0)
    return float(np.max(sent.sum(axis=0) - np.diag(sent))) * shape.token_bytes


def main() -> None:
    parser = modelled_arguments(__doc__, layers=1)
    parser.set_defaults(hardware="h100", kernel="triton", coarsen=4)
    options = parser.parse_args()
    print_table("A step's self-attentions", write_csv("guidance", list(measure(options)), options.out))


if __name__ == "__main__":
    main()
