"""Moving what a plan means for a rank to another device changes where tensors are, and nothing else."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any

import pytest
import torch

from dbsp_core import BlockGrid, BlockMask, SequenceLayout, make_plan
from dbsp_core.runtime.rank_plan import RankPlan
from dbsp_core.runtime.tables import Span, table_layout

META = torch.device("meta")


def assert_moved(here: Any, there: Any, path: str) -> int:
    """Compares two objects field by field; returns how many tensors were moved to META."""
    assert type(there) is type(here), path
    if isinstance(here, torch.Tensor):
        assert (there.device, there.shape, there.dtype) == (META, here.shape, here.dtype), path
        return 1
    if isinstance(here, tuple):
        assert len(there) == len(here), path
        return sum(
            assert_moved(one, other, f"{path}[{i}]") for i, (one, other) in enumerate(zip(here, there, strict=True))
        )
    if is_dataclass(here) and here is not there:
        parts = ((getattr(here, field.name), getattr(there, field.name), field.name) for field in fields(here))
        return sum(assert_moved(one, other, f"{path}.{name}") for one, other, name in parts)
    assert here is there or here == there, path
    return 0


def plan_of(strategy: str, keys: str = "all"):
    grid = BlockGrid.uniform(256, 16)
    bits = torch.rand(4, 16, 16, generator=torch.Generator().manual_seed(0)) < 0.4
    bits[1] = True
    return make_plan(BlockMask(bits, grid), strategy, keys=keys)


@pytest.mark.parametrize("strategy", ["U2R1", "U1R3", "U2R2"])
def test_table_layout_on_another_device_keeps_its_spans(strategy):
    plan = plan_of(strategy)
    for rank in range(plan.strategy.world):
        here = table_layout(plan, rank)
        there = here.to(META)
        spans = [span for of_period in there.spans for span in of_period]
        assert spans
        assert all(isinstance(span, Span) for span in spans)
        assert all(span.lengths is not None and span.rows[1] > span.rows[0] for span in spans)


@pytest.mark.parametrize("keys", ["all", "needed"])
@pytest.mark.parametrize("strategy", ["U2R1", "U1R3", "U2R2"])
def test_rank_plan_on_another_device_differs_in_its_tensors_alone(strategy, keys):
    plan = plan_of(strategy, keys)
    layout = SequenceLayout.contiguous(256, plan.strategy.world)
    for rank in range(plan.strategy.world):
        here = RankPlan.of(plan, layout, rank)
        there = here.to(META)
        assert (
            assert_moved(here.table_layout, there.table_layout, "table_layout")
            == 6 + 2 * here.table_layout.columns.shape[0]
        )
        assert assert_moved(here.route, there.route, "route")
        for field in fields(here):
            if field.name not in ("table_layout", "route"):
                assert getattr(there, field.name) is getattr(here, field.name), field.name
        assert here.to(torch.device("cpu")).table_layout is here.table_layout
