"""Plans that look ahead, and the budget by which they are replaced: heads that drift, worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from dbsp_core import BlockGrid, BlockMask, Plan, SequenceGroup, make_plan
from dbsp_core.config.config import DbspConfig
from dbsp_core.planning.assignment import Assignment
from dbsp_core.planning.key_travel import RingKeys
from dbsp_core.runtime.plan_reuse.async_plan_cache import AsyncPlanCache
from dbsp_core.runtime.plan_reuse.forecast import (
    UNIT,
    DensityTrend,
    ForecastMask,
    choose_longest_lived,
    forecast_offsets,
)
from dbsp_core.runtime.plan_reuse.plan_cache import PlanCache, PlansBy
from dbsp_core.runtime.plan_reuse.rule import ReplanRule
from tests.core.runtime.reuse_cases import mask_of

GRID = BlockGrid.uniform(16 * 16, 16)


def plan_u2(mask: BlockMask) -> Plan:
    return make_plan(mask, "U2R1", "paper")


def drifting(call: int) -> BlockMask:
    """Heads 0 and 1 grow while 2 and 3 shrink, by 4 of 100 a call."""
    return mask_of(100 + 4 * call, 98 + 4 * call, 102 - 4 * call, 100 - 4 * call, grid=GRID)


def noted(*masks: BlockMask) -> DensityTrend:
    trend = DensityTrend()
    for mask in masks:
        trend.update(mask)
    return trend


class TestTrend:
    def test_nothing_is_foreseen_from_one_mask(self):
        assert (noted(drifting(0)).predict([1, 9]) == UNIT).all()

    def test_steady_change_goes_on(self):
        growth = noted(*map(drifting, range(9))).predict([0, 5])
        assert (growth[0] == UNIT).all()
        expected = [152 / 132, 150 / 130, 50 / 70, 48 / 68]
        assert growth[1] == pytest.approx(np.array(expected) * UNIT, abs=1)

    def test_change_to_and_fro_does_not(self):
        masks = [drifting(call) for call in (0, 3, 4, 3, 0, 3, 4, 3, 0)]
        masks[4] = drifting(5)
        assert (noted(*masks).predict([5]) == UNIT).all()

    def test_what_shrinks_does_not_become_negative(self):
        assert noted(drifting(0), drifting(20)).predict([25])[0, 2:].tolist() == [0, 0]

    def test_another_number_of_heads_starts_anew(self):
        assert noted(drifting(0), drifting(1), mask_of(3, 4, 5)).predict([4]).tolist() == [[UNIT] * 3]


def test_a_foreseen_mask_has_the_counts_of_its_heads_times_whole_numbers():
    bits = np.random.default_rng(0).random((3, 16, 16)) < 0.4
    mask, growth = BlockMask(bits, GRID), np.array([5, 7, 11])
    predicted = ForecastMask.of(mask, growth)
    slots = np.random.default_rng(1).integers(0, 2, (3, 16))
    owner = np.random.default_rng(2).integers(0, 4, (3, 16))
    repeated = BlockMask(np.repeat(bits, growth, axis=0), GRID)
    head = np.repeat(np.arange(3), growth)
    strategy = make_plan(mask, "U2R2").strategy
    assert (predicted.counts.rows == mask.counts.rows * growth[:, None]).all()
    assert (predicted.counts.columns == mask.counts.columns * growth[:, None]).all()
    expected = Assignment(strategy, GRID, owner[head], RingKeys(slots[head], strategy.ring)).work(repeated.counts)
    assert (Assignment(strategy, GRID, owner, RingKeys(slots, strategy.ring)).work(predicted.counts) == expected).all()
    finer = GRID.resized(8, 8)
    assert (predicted.subdivided(finer).counts.rows == mask.subdivided(finer).counts.rows * growth[:, None]).all()


@pytest.mark.parametrize("delay", [0, 1])
def test_of_plans_the_one_that_serves_longest_is_taken(delay):
    """Heads 0, 1 grow, 2, 3 shrink: only one of each together in a column serves for long."""
    trend = noted(*map(drifting, range(3)))
    mask = drifting(2)
    together = np.repeat([[0], [0], [1], [1]], 16, axis=1)
    level = plan_u2(mask)
    first = replace(level, assignment=replace(level.assignment, q_owner=together))
    apart = plan_u2(mask_of(4, 3, 1, 2, grid=GRID))  # 0 with 2, 1 with 3
    tried = []

    def again(later: BlockMask) -> Plan:
        tried.append(later.counts.rows.sum(axis=1).tolist())
        return apart

    chosen = choose_longest_lived(mask, trend, first, again, threshold=1.1, budget=0.3, delay=delay)
    assert chosen.assignment is apart.assignment
    assert chosen.rho == apart.evaluate(mask).rho
    now, change = np.array([108, 106, 94, 92]), np.array([4, 4, -4, -4])
    calls = delay + forecast_offsets(first.strategy)[0]
    assert tried[0] == (now * np.rint((1 + calls * change / now) * UNIT)).tolist()


def test_the_plan_for_the_mask_at_hand_stands_where_none_serves_longer():
    mask = drifting(2)
    first = plan_u2(mask)
    assert choose_longest_lived(mask, noted(mask), first, plan_u2, threshold=1.1, budget=0.3, delay=0) is first


class TestBudget:
    """Two columns; the plan of the first mask: heads 0 and 3, 1 and 2."""

    FIRST, WORSE = mask_of(6, 4, 4, 2), mask_of(6, 4, 2, 4)  # ρ_s = 1, then 1.25 under the same plan

    @pytest.mark.parametrize("lagged", [False, True])
    def test_a_plan_is_replaced_when_it_has_wasted_more_than_the_budget(self, lagged):
        rule = ReplanRule(threshold=2.0, budget=0.5)
        cache = AsyncPlanCache(rule, group=SequenceGroup(0, 1)) if lagged else PlanCache(rule)
        replans = []
        for mask in (self.FIRST, self.WORSE, self.WORSE, self.WORSE, self.WORSE):
            cache.plan_for(0, mask, PlansBy(plan_u2, ahead=False))
            cache.flush()
            replans.append(cache.counters.replans)
        assert replans == [1, 1, 1, 2, 2]  # 0.25, 0.5, and 0.75 is too much

    def test_what_no_plan_could_do_better_is_not_waste(self):
        cache = PlanCache(ReplanRule(threshold=2.0, budget=0.1))
        uneven = mask_of(60, 4, 4, 4)
        for _ in range(20):
            assert cache.plan_for(0, uneven, PlansBy(plan_u2, ahead=False)).plan.rho > 1.5
        assert cache.counters.replans == 1

    def test_the_threshold_holds_beside_it(self):
        cache = PlanCache(ReplanRule(threshold=1.2, budget=9.0))
        for mask in (self.FIRST, self.WORSE):
            cache.plan_for(0, mask, PlansBy(plan_u2, ahead=False))
        assert cache.counters.replans == 2

    @pytest.mark.parametrize("lagged", [False, True])
    def test_looking_ahead_saves_plans_on_steady_drift(self, lagged):
        def run(seed: int, ahead: bool) -> np.ndarray:
            """[plans made, sum of ρ_s]"""
            rng = np.random.default_rng(seed)
            start, slope = rng.integers(90, 160, 12), rng.normal(0, 1.5, 12)
            rule = ReplanRule(1.1, 0.2)
            cache = AsyncPlanCache(rule, group=SequenceGroup(0, 1)) if lagged else PlanCache(rule)
            for call in range(40):
                mask = mask_of(*np.rint(start + slope * call).astype(int), grid=GRID)
                cache.plan_for(0, mask, PlansBy(lambda m: make_plan(m, "U4R1"), ahead))
            cache.flush()
            return np.array([cache.counters.replans, cache.counters.rho_used])

        blind = sum(run(seed, False) for seed in range(6))
        sighted = sum(run(seed, True) for seed in range(6))
        assert sighted[0] < blind[0]
        assert sighted[1] <= blind[1]


def test_a_budget_must_be_positive_or_none():
    assert DbspConfig.load({"reuse": {"budget": None}}).reuse.budget is None
    for wrong in (0.0, -1.0):
        with pytest.raises(ValueError, match=r"reuse.budget=.* or null to replan by the threshold alone"):
            DbspConfig.load({"reuse": {"budget": wrong}})
