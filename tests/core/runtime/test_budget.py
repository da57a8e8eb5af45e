"""The budget by which plans are replaced, worked out by hand."""

from __future__ import annotations

import pytest

from dbsp_core import BlockMask, Plan, SequenceGroup, make_plan
from dbsp_core.config.config import DbspConfig
from dbsp_core.runtime.session.async_plan_cache import AsyncPlanCache
from dbsp_core.runtime.session.plan_cache import PlansBy, SyncPlanCache
from dbsp_core.runtime.session.replan_rule import ReplanRule
from tests.core.runtime.reuse_cases import mask_of


def plan_u2(mask: BlockMask) -> Plan:
    return make_plan(mask, "U2R1", "paper")


class TestBudget:
    """Two columns; the plan of the first mask: heads 0 and 3, 1 and 2."""

    FIRST, WORSE = mask_of(6, 4, 4, 2), mask_of(6, 4, 2, 4)  # ρ_s = 1, then 1.25 under the same plan

    @pytest.mark.parametrize("asynchronous", [False, True])
    def test_a_plan_is_replaced_when_it_has_wasted_more_than_the_budget(self, asynchronous):
        rule = ReplanRule(threshold=2.0, budget=0.5)
        cache = AsyncPlanCache(rule, group=SequenceGroup(0, 1)) if asynchronous else SyncPlanCache(rule)
        replans = []
        for mask in (self.FIRST, self.WORSE, self.WORSE, self.WORSE, self.WORSE):
            cache.plan_for(0, mask, PlansBy(plan_u2))
            cache.flush()
            replans.append(cache.counters.replans)
        assert replans == [1, 1, 1, 2, 2]  # 0.25, 0.5, and 0.75 is too much

    def test_what_no_plan_could_do_better_is_not_waste(self):
        cache = SyncPlanCache(ReplanRule(threshold=2.0, budget=0.1))
        uneven = mask_of(60, 4, 4, 4)
        for _ in range(20):
            assert cache.plan_for(0, uneven, PlansBy(plan_u2)).plan.rho > 1.5
        assert cache.counters.replans == 1

    def test_the_threshold_holds_beside_it(self):
        cache = SyncPlanCache(ReplanRule(threshold=1.2, budget=9.0))
        for mask in (self.FIRST, self.WORSE):
            cache.plan_for(0, mask, PlansBy(plan_u2))
        assert cache.counters.replans == 2


def test_a_budget_must_be_positive_or_none():
    assert DbspConfig.load({"reuse": {"budget": None}}).reuse.budget is None
    for wrong in (0.0, -1.0):
        with pytest.raises(ValueError, match=r"reuse.budget=.* or null to replan by the threshold alone"):
            DbspConfig.load({"reuse": {"budget": wrong}})
