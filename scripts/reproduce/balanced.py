"""§4.2: ρ_s after balancing, for every planner and strategy on 8 GPUs, on synthetic masks, next to the paper's.

Others run on rings, whose ranks wait for one another in every ring step (Eq. 1); db-SP's ranks in none.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import numpy as np

from dbsp_core import Plan, Strategy, make_plan
from dbsp_core.layout.sequence_layout import SequenceLayout
from dbsp_core.planning.balance import rho_bound
from dbsp_core.planning.planners import PLANNERS
from scripts.reproduce.common import BALANCED, MEASURED, STRATEGIES, arguments, masks
from scripts.reproduce.lockstep import RingPlan, plan_ring, rho_before
from scripts.results.result import Result, Row

PRESETS = ("wan2.1-t2v-14b", "cogvideox1.5-5b")
WAYS = (*((planner, "contiguous") for planner in PLANNERS), ("contiguous", "striped"), ("dbsp", "striped"))
"""Planners, with their sequence layouts."""


def measure(options: argparse.Namespace) -> Iterator[Row]:
    """Plans the same masks in every way; means over layers. moved: share of Q, K and V that changes ring rank"""
    for preset in PRESETS:
        layers = list(masks(preset, options))
        for strategy in STRATEGIES:
            parsed = Strategy.parse(strategy)
            before = float(np.mean([rho_before(mask, strategy) for mask in layers]))
            bound = float(np.mean([rho_bound(mask.counts.rows, parsed.world) for mask in layers]))
            for planner, layout in WAYS:
                tokens_at = SequenceLayout.named(layout, layers[0].grid, parsed)
                plans: list[Plan | RingPlan] = [
                    make_plan(mask, parsed, layout=tokens_at, compare=False)
                    if planner == "dbsp"
                    else plan_ring(mask, parsed, planner, tokens_at)
                    for mask in layers
                ]
                yield Row(
                    preset=preset,
                    strategy=strategy,
                    planner=planner,
                    layout=layout,
                    rho=float(np.mean([plan.rho for plan in plans])),
                    rho_max=max(plan.rho for plan in plans),
                    rho_before=before,
                    bound=bound,
                    moved=float(np.mean([plan.moved for plan in plans])),
                    paper=BALANCED[strategy][0],
                    slides=BALANCED[strategy][1],
                    label=MEASURED,
                    layers=len(plans),
                )


if __name__ == "__main__":
    Result("balanced", "ρ_s after balancing, 8 GPUs").run(arguments(__doc__, layers=40), measure)
