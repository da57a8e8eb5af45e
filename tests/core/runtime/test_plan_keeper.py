"""Plans are kept while they are balanced: worked out with two Ulysses columns and two heads each."""

from __future__ import annotations

import pytest

from dbsp_core import BlockGrid, BlockMask
from dbsp_core.runtime.plan_keeper import PlanKeeper, replay
from tests.core.runtime.keeper_cases import (
    GRID,
    mask_of,
    planner_that_goes_wrong,
    plans_on,
    plans_with_late_counts,
    two_generations,
)

FIRST = mask_of(6, 4, 4, 2)
"""Heads 0 and 3 go to one column, 1 and 2 to the other: 8 and 8."""
AT_THRESHOLD = mask_of(6, 4, 2, 4)
"""Under that plan 10 and 6: ρ_s = 10 / (16 / 2) = 1.25."""
ABOVE = mask_of(7, 3, 2, 4)
"""Under that plan 11 and 5: ρ_s = 1.375. Planned again: heads 0 and 2, heads 1 and 3, hence 9 and 7."""


def plan_of(mask: BlockMask) -> int:
    return plans_on(mask.grid, "U2R1")(mask.counts.rows, None).fingerprint


OLD, NEW = plan_of(FIRST), plan_of(ABOVE)


@pytest.fixture
def keeper():
    return PlanKeeper(1.25, compare=False)


class TestKnownMasks:
    """A plan is made from the mask that it is for, at once."""

    @staticmethod
    def use(keeper, key, mask):
        use = keeper.plan_known(key, mask, plans_on(mask.grid, "U2R1"))
        keeper.use(key, use)
        return use

    def test_at_the_threshold_a_plan_is_kept_with_the_numbers_of_the_new_mask(self, keeper):
        assert self.use(keeper, 0, FIRST).new
        use = self.use(keeper, 0, AT_THRESHOLD)
        assert (use.plan.fingerprint, use.plan.rho, use.new) == (OLD, 1.25, False)
        assert (keeper.statistics.calls, keeper.statistics.plans) == (2, 1)

    def test_above_the_threshold_a_new_plan_is_made_and_kept_from_then_on(self, keeper):
        self.use(keeper, 0, FIRST)
        use = self.use(keeper, 0, ABOVE)
        assert (use.plan.fingerprint, use.plan.rho, use.new) == (NEW, 9 / 8, True)
        assert not self.use(keeper, 0, ABOVE).new
        assert (keeper.statistics.calls, keeper.statistics.plans) == (3, 2)

    def test_every_attention_has_a_plan_of_its_own(self, keeper):
        assert [self.use(keeper, key, mask).plan.fingerprint for key, mask in ((0, FIRST), (1, ABOVE))] == [OLD, NEW]
        assert [self.use(keeper, key, mask).plan.fingerprint for key, mask in ((0, FIRST), (1, ABOVE))] == [OLD, NEW]

    @pytest.mark.parametrize(
        "mask", [mask_of(6, 4, 4, 2, grid=BlockGrid.uniform(9 * 16, 16)), mask_of(6, 4, 4)], ids=["grid", "heads"]
    )
    def test_another_grid_or_number_of_heads_needs_a_new_plan(self, keeper, mask):
        self.use(keeper, 0, FIRST)
        use = self.use(keeper, 0, mask)
        assert (use.plan.grid, use.plan.heads, use.new) == (mask.grid, mask.heads, True)

    def test_a_plan_that_ranks_did_not_agree_on_is_not_kept(self, keeper):
        self.use(keeper, 0, FIRST)
        keeper.plan_known(0, ABOVE, plans_on(GRID, "U2R1"))  # and no `use`
        assert self.use(keeper, 0, FIRST).plan.fingerprint == OLD


class TestPredictedMasks:
    """What a call uses was settled by the counts of the call before."""

    @staticmethod
    def plans(keeper, masks, key=0):
        return [keeper.plan_predicted(key, mask, plans_on(mask.grid, "U2R1")).plan.fingerprint for mask in masks]

    def test_a_new_plan_is_adopted_one_call_later(self, keeper):
        assert self.plans(keeper, [FIRST, ABOVE, ABOVE, ABOVE, FIRST]) == [OLD, OLD, NEW, NEW, NEW]

    def test_statistics_are_of_rho_in_use_not_of_the_plans_made(self, keeper):
        self.plans(keeper, [FIRST, ABOVE, ABOVE])
        keeper.settle()
        found = keeper.statistics
        assert (found.calls, found.plans, found.counted) == (3, 2, 3)
        assert found.rho_sum == 1.0 + 1.375 + 9 / 8
        assert found.worst_rho == 1.375
        assert keeper.last_used(0).rho == 9 / 8

    def test_reading_statistics_between_calls_changes_no_decision(self, keeper):
        plans = []
        for mask in (FIRST, ABOVE, ABOVE):
            plans += self.plans(keeper, [mask])
            keeper.settle()
        assert plans == [OLD, OLD, NEW]

    def test_at_the_threshold_the_plan_is_kept(self, keeper):
        assert self.plans(keeper, [FIRST, AT_THRESHOLD, FIRST]) == [OLD] * 3
        assert keeper.statistics.plans == 1

    def test_a_call_with_other_heads_plans_at_once(self, keeper):
        """Guidance is switched off between two calls, while counts of more heads are under way."""
        self.plans(keeper, [FIRST, ABOVE])
        use = keeper.plan_predicted(0, mask_of(6, 4), plans_on(GRID, "U2R1"))
        assert (use.plan.heads, use.new) == (2, True)
        keeper.settle()
        assert keeper.statistics.counted == 3

    def test_an_error_in_planning_leaves_what_was_kept(self, keeper):
        self.plans(keeper, [FIRST, ABOVE])

        def fail(rows, current):
            raise ZeroDivisionError("no planner today")

        with pytest.raises(ZeroDivisionError):
            keeper.plan_predicted(0, ABOVE, fail)
        assert self.plans(keeper, [ABOVE]) == [NEW]

    def test_what_is_replayed_is_what_is_done(self, keeper):
        masks = [FIRST, ABOVE, AT_THRESHOLD, FIRST, ABOVE]
        uses = replay([mask.counts.rows for mask in masks], 1.25, plans_on(GRID, "U2R1"))
        assert [use.plan.fingerprint for use in uses] == self.plans(keeper, masks)
        keeper.settle()
        assert sum(use.counted.rho for use in uses) == keeper.statistics.rho_sum
        assert sum(use.new for use in uses) == keeper.statistics.plans

    def test_a_generation_begins_with_the_plan_that_the_last_ones_first_mask_led_to(self, keeper):
        """Generations of FIRST, ABOVE: after ABOVE, the plan for FIRST is taken up again, and is no new plan."""
        steps = [(FIRST, 0), (ABOVE, 1), (ABOVE, 2)] * 2
        uses = [keeper.plan_predicted(0, mask, plans_on(GRID, "U2R1"), step) for mask, step in steps]
        assert [use.plan.fingerprint for use in uses] == [OLD, OLD, NEW, OLD, OLD, NEW]
        assert [use.new for use in uses] == [True, False, True, False, False, True]
        counts = [mask.counts.rows for mask, _ in steps]
        replayed = replay(counts, 1.25, plans_on(GRID, "U2R1"), steps=3)
        assert [use.plan.fingerprint for use in replayed] == [use.plan.fingerprint for use in uses]
        assert [use.new for use in replayed] == [use.new for use in uses]

    def test_if_first_masks_change_the_next_generation_but_one_begins_with_a_new_plan(self, keeper):
        steps = [(FIRST, 0), (ABOVE, 1), (ABOVE, 0), (ABOVE, 1), (ABOVE, 0)]
        uses = [keeper.plan_predicted(0, mask, plans_on(GRID, "U2R1"), step) for mask, step in steps]
        assert [use.plan.fingerprint for use in uses] == [OLD, OLD, OLD, NEW, NEW]

    @pytest.mark.parametrize("lag", [True, False])
    def test_counts_of_other_heads_are_planned_at_once(self, lag):
        counts = [mask.counts.rows for mask in (FIRST, mask_of(6, 4), mask_of(6, 4))]
        uses = replay(counts, 1.25, plans_on(GRID, "U2R1"), lag=lag)
        assert [(use.plan.heads, use.new) for use in uses] == [(4, True), (2, True), (2, False)]


class TestLateCounts:
    def test_all_ranks_change_plans_at_the_same_call(self, pool):
        """Whenever each rank's copies arrive."""
        answers = pool(3).run(plans_with_late_counts, False)
        assert all(answer == answers[0] for answer in answers)
        assert len(set(answers[0])) > 3, "masks must ask for new plans"

    def test_ranks_that_did_not_wait_would_part(self, pool):
        answers = pool(3).run(plans_with_late_counts, True)
        assert answers[0] != answers[1]


@pytest.mark.parametrize(("world", "odd"), [(2, 0), (3, 2)])
@pytest.mark.parametrize(("fault", "message"), [("raises", "no planner today"), ("differs", "the plan differs on")])
def test_a_planner_that_goes_wrong_on_one_rank_is_raised_on_all_at_the_same_call(pool, world, odd, fault, message):
    for raised in pool(world).run(planner_that_goes_wrong, odd, fault):
        assert [bool(text) for text in raised] == [False, False, True, False], raised
        assert message in raised[2]


@pytest.mark.parametrize("steps", [4, 8])
def test_a_generation_begins_with_the_plans_of_the_last_one(pool, steps):
    for threshold in (1.02, 9.0):
        for seen in pool(2).run(two_generations, steps, threshold):
            above = [True, *(rho > threshold for _, rho, _ in seen[:-1])]
            above[steps] = False
            assert [new for new, *_ in seen] == above
            assert all(same or new for new, _, same in seen)
