"""The closed form of an attention's peak memory: equal to the counted one, and what follows from a limit on it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dbsp_core import BlockGrid, BlockMask, SequenceLayout, Strategy, make_plan
from dbsp_core.cost.latency import AttentionShape
from dbsp_core.cost.peak_memory import chunks_for, peak_bytes
from generators import random_bits
from peak_memory import peak_of_attention
from selection_cases import plans_within
from workers import WorkerError

D = 16


def a_mask(heads: int, tokens: int = 1030) -> BlockMask:
    """Heads of very different densities, a short last block."""
    grid = BlockGrid.uniform(tokens, 16)
    bits = random_bits(heads, grid, seed=heads)
    bits[1::2, :, ::3] = False
    return BlockMask(bits, grid)


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("heads", [40, 12, 5])
def test_every_ranks_peak_is_the_counted_one(heads, dtype, gradients):
    mask = a_mask(heads)
    for strategy in (*Strategy.all_for(8), Strategy(3, 2), Strategy(1, 1)):
        layout = SequenceLayout.striped(mask.grid, strategy)
        plan = make_plan(mask, strategy, layout=layout)
        shape = AttentionShape(1, heads, mask.grid.tokens, D, dtype.itemsize)
        unit = heads * layout.shard * D * dtype.itemsize
        counted = [
            peak_of_attention(plan, mask, layout, rank, D, dtype, gradients=gradients)
            for rank in range(strategy.world)
        ]
        formula = peak_bytes(plan.assignment, shape, layout, gradients=gradients)
        assert (formula / unit).tolist() == pytest.approx(counted, abs=1e-9), str(strategy)


@pytest.mark.parametrize("gradients", [False, True])
def test_every_ranks_peak_with_needed_keys(gradients):
    mask = a_mask(12)
    for strategy in (Strategy(8, 1), Strategy(2, 4), Strategy(1, 6)):
        layout = SequenceLayout.named("local", mask.grid, strategy)
        plan = make_plan(mask, strategy, layout=layout, keys="needed")
        shape = AttentionShape(1, 12, mask.grid.tokens, D, 4)
        unit = 12 * layout.shard * D * 4
        counted = [
            peak_of_attention(plan, mask, layout, rank, D, torch.float32, gradients=gradients)
            for rank in range(strategy.world)
        ]
        formula = peak_bytes(plan.assignment, shape, layout, gradients=gradients)
        assert (formula / unit).tolist() == pytest.approx(counted, abs=1e-9), str(strategy)


class TestLimit:
    def run(self, pool, limit, free=None, **settings):
        """(strategy, peak, most heads) of each layer, which all ranks have alike, and rank 0's warnings."""
        planner = {"memory_limit": limit, "exchange_cost": 0.0}  # balance first: memory last
        answers = pool(4).run(plans_within, {"strategy": "auto", "planner": planner, **settings}, free or {})
        assert all(plans == answers[0][0] for plans, _ in answers)
        assert all(not told for _, told in answers[1:])
        return answers[0]

    def test_strategies_above_it_drop_out_on_all_ranks_alike(self, pool):
        free, warnings = self.run(pool, None, cost_model="h200")
        assert not warnings
        most = max(peak for _, peak, _ in free)
        assert self.run(pool, int(most), cost_model="h200") == (free, [])
        tight, warnings = self.run(pool, int(most) - 1, cost_model="h200")
        assert not warnings
        assert all(peak < most for _, peak, _ in tight)
        assert tight != free

    def test_where_none_fits_the_least_is_taken_with_one_warning(self, pool):
        plans, (warning,) = self.run(pool, "1KiB")
        assert f"holds {plans[0][1] / 1024:.3g} KiB on a rank" in warning
        assert "planner.memory_limit leaves, 1 KiB: all strategies exceed it, so" in warning
        strategies = [self.run(pool, "1KiB", strategy=str(one))[0] for one in Strategy.all_for(4)]
        assert plans[0][1] == min(one[0][1] for one in strategies)

    def test_auto_is_the_least_that_any_rank_has_free_less_the_inputs(self, pool):
        free, _ = self.run(pool, "auto", strategy="U4R1")
        peak = max(peak for _, peak, _ in free)
        inputs = 3 * 5 * 48 * 16 * 4
        assert self.run(pool, "auto", {2: 4 * int(peak + inputs)}, strategy="U4R1") == (free, [])  # four on a host
        tight, _ = self.run(pool, "auto", {2: 4 * int(peak + inputs) - 4}, strategy="U4R1")
        assert max(peak for _, peak, _ in tight) < peak
        assert sum(heads for *_, heads in tight) < sum(heads for *_, heads in free)

    def test_where_nobody_knows_what_is_free_all_ranks_say_so(self, pool):
        with pytest.raises(WorkerError) as raised:
            pool(4).run(plans_within, {"strategy": "auto", "planner": {"memory_limit": "auto"}}, {1: None})
        assert [rank for rank, *_ in raised.value.errors] == [0, 1, 2, 3]
        assert all("write an amount" in text for *_, text in raised.value.errors)


def test_keys_come_in_as_few_parts_as_fit():
    beside, sent, fetched = np.array([10.0, 20.0]), np.array([30.0, 5.0]), np.array([40.0, 50.0])
    assert chunks_for(None, beside, sent, fetched, 8) == 1
    assert chunks_for(120, beside, sent, fetched, 8) == 1  # 20 + 2 · 50
    assert chunks_for(119, beside, sent, fetched, 8) == 2  # 20 + 3 · 50 / 2, and 10 + (2 · 40 + 30) / 2
    assert chunks_for(94.9, beside, sent, fetched, 8) == 3
    assert chunks_for(1, beside, sent, fetched, 8) == 8
