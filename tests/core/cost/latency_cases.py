"""Machines of which all but a few constants are free, and plans for them."""

from __future__ import annotations

from dbsp_core import BlockGrid, BlockMask, SequenceLayout, Strategy, make_plan
from dbsp_core.cost.machine import Constants, Hardware
from dbsp_core.cost.prediction import AttentionShape
from tests.support.generators import random_bits

NAMES = Constants.__dataclass_fields__


def machine(**changes) -> Hardware:
    """Returns hardware with every constant 0 seconds or a rate of 1e30 (free), except those given."""
    constants = {name: 1e30 if name.endswith("_per_s") else 0.0 for name in NAMES}
    constants |= {"overlap": 1.0, "network_latency_s": None, "network_bytes_per_s": None, **changes}
    sources = {name: "assumed" for name, value in constants.items() if value is not None}
    return Hardware("test", "none", "bfloat16", Constants(**constants), sources)


def a_plan(strategy="U2R2", planner="dbsp", heads=6, tokens=512, layout_name=None, seed=3):
    grid = BlockGrid.uniform(tokens, 16)
    mask = BlockMask(random_bits(heads, grid, seed), grid)
    layout = SequenceLayout.named(layout_name, grid, Strategy.parse(strategy)) if layout_name else None
    return make_plan(mask, strategy, planner, layout=layout), mask, layout


def shape_of(plan, batch=1, head_dim=8, element_bytes=2) -> AttentionShape:
    return AttentionShape(batch, plan.heads, head_dim, element_bytes)
