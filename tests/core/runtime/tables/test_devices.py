"""Moving what a plan means for a rank to another device changes where tensors are, and nothing else."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import Any

import pytest
import torch

from dbsp_core import BlockGrid, BlockMask, SequenceGroup, SequenceLayout, Strategy, make_plan
from dbsp_core.comm.exchange_tables import build_route
from dbsp_core.runtime.prepared import PreparedAttention
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
def test_route_and_table_layout_on_another_device_differ_in_their_tensors_alone(strategy, keys):
    plan = plan_of(strategy, keys)
    layout = SequenceLayout.contiguous(256, plan.strategy.world)
    for rank in range(plan.strategy.world):
        route = build_route(plan, layout, rank, layout.shard, torch.device("cpu"))
        tables = table_layout(plan, rank)
        moved = assert_moved(tables, tables.to(META), "table_layout")
        assert moved == 6 + 2 * tables.columns.shape[0]
        assert assert_moved(route, route.to(META), "route")
        assert tables.to(torch.device("cpu")) is tables


@pytest.mark.parametrize("strategy", ["U2R1", "U1R3", "U2R2"])
def test_another_mask_of_the_same_routes_takes_what_does_not_depend_on_it(strategy):
    plan = plan_of(strategy)
    layout, group = SequenceLayout.contiguous(256, plan.strategy.world), SequenceGroup(0, plan.strategy.world)
    mask = BlockMask.dense(plan.heads, plan.grid)
    first = PreparedAttention.of(plan, mask, layout, group, "auto", device=torch.device("cpu"))
    transposed, backward = first.table_layout.transposed, first.route.combine_exchange.backward
    second = first.for_mask(plan.counted(mask), mask)
    assert second.route is first.route
    assert second.table_layout.transposed is transposed, "made at the first use, for all masks"
    assert second.route.combine_exchange.backward is backward
    other = make_plan(mask, Strategy(plan.strategy.ulysses, plan.strategy.ring), "contiguous", layout=layout)
    moved = replace(other, owner=(other.owner + 1) % plan.strategy.world)
    with pytest.raises(ValueError, match="made for another plan"):
        first.for_mask(moved, mask)
