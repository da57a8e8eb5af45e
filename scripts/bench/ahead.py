"""What it gains to send q, k and v before their mask is predicted, modelled.

Plans lag predicted masks by one call, so q, k and v leave while the mask is predicted. What is hidden is at most the
shorter of the prediction and their exchange: the means of blocks, which ranks exchange to predict, wait for it where
both use one communicator. Queries that are exchanged separately leave afterwards.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass

from dbsp_core import Plan, SequenceLayout, Strategy, make_plan
from dbsp_core.comm.exchange_tables import exchange_q_separately
from dbsp_core.cost.machine import Hardware, load_hardware
from dbsp_core.cost.prediction import AttentionShape, exchange_s, predict, traffic_of
from dbsp_core.planning.plan import usual_layout
from scripts.reproduce.common import STRATEGIES, arguments, masks, preset_model
from scripts.results.result import Result

PRESETS = "wan2.1-t2v-14b", "cogvideox1.5-5b"
MACHINES = "h100", "h200", "a800"
SHARES = 0.02, 0.04, 0.06
"""What prediction takes of an attention without it. On an H200: 1.03 ms of Wan2.1-14B's 12.0 (docs/kernels.md)."""


@dataclass(frozen=True)
class Row:
    """One attention, mean over layers, in bfloat16.

    Attributes:
        attention_ms: All but prediction.
        sent_ms: Of it the exchange that can start before the mask is known.
        gain_2, gain_4, gain_6: Share of the whole call that is hidden, if prediction takes 2, 4 or 6 %.
    """

    preset: str
    machine: str
    strategy: str
    attention_ms: float
    sent_ms: float
    gain_2: float
    gain_4: float
    gain_6: float
    label: str = "modelled, at most"


def measure(options: argparse.Namespace) -> Iterator[Row]:
    machines = {name: load_hardware(name) for name in MACHINES}
    for preset in PRESETS:
        layers = list(masks(preset, options))
        for strategy in map(Strategy.parse, STRATEGIES):
            layout = usual_layout("dbsp", layers[0].grid, strategy)
            plans = [make_plan(mask, strategy, layout=layout, compare=False) for mask in layers]
            shape = AttentionShape(1, layers[0].heads, preset_model(preset).head_dim)
            for name, hardware in machines.items():
                seconds = [_seconds(plan, shape, hardware, layout) for plan in plans]
                total, sent = (sum(times) / len(seconds) for times in zip(*seconds, strict=True))
                gains = [min(share * total, sent) / (total * (1 + share)) for share in SHARES]
                yield Row(preset, name, str(strategy), 1e3 * total, 1e3 * sent, *gains)


def _seconds(plan: Plan, shape: AttentionShape, hardware: Hardware, layout: SequenceLayout) -> tuple[float, float]:
    """Returns seconds of an attention, and of what is sent ahead."""
    known = hardware.at_blocks(plan.grid.block_q, plan.grid.block_k)
    traffic = traffic_of(plan, layout)
    tokens = 2 * traffic.keys[0] if exchange_q_separately(plan) else traffic.dispatch
    ahead = exchange_s(tokens * shape.sent_bytes(plan.comm_dtype), known, [0] * plan.strategy.world)
    return predict(plan, shape, hardware, layout=layout).total_s, ahead


if __name__ == "__main__":
    Result("ahead", "Sent before predicting", Row).run(arguments(__doc__, layers=4), measure)
