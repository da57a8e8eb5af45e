"""Plans are kept while they are balanced: worked out with two Ulysses columns and two heads each."""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

from dbsp_core import BlockGrid, BlockMask
from dbsp_core.masks.steps import DenoisingStep
from dbsp_core.planning.plan import plan_from_counts
from dbsp_core.planning.reuse import MakePlan, PlanUse, ReuseStatistics, UsualCounts, replay
from dbsp_core.runtime.prepared import KnownMask
from dbsp_core.runtime.slot import Slot
from tests.core.runtime.session_cases import PREDICTED, Session
from tests.support.outcomes import said

GRID = BlockGrid.uniform(8 * 16, 16)


def mask_of(*work: int, grid: BlockGrid = GRID) -> BlockMask:
    """Returns a mask whose heads have so many active blocks, from the top left on."""
    bits = np.zeros((len(work), grid.nq * grid.nk), dtype=bool)
    for head, dense in zip(bits, work, strict=True):
        head[:dense] = True
    return BlockMask(bits.reshape(-1, grid.nq, grid.nk), grid)


def plans_on(grid: BlockGrid, strategy: str, planner: str = "paper") -> MakePlan:
    """Makes a plan for row counts of masks on a grid."""
    return lambda rows, _current: plan_from_counts(rows, grid, strategy, planner)


@pytest.fixture
def slot() -> Slot:
    return Slot(((), 0, 0), threshold=1.25, lags=True, compare=False, statistics=ReuseStatistics())


def use_predicted(slot: Slot, mask: BlockMask, make: MakePlan, generation: int = 0, step: int = 0) -> PlanUse:
    """Makes a call with a predicted mask, of one item."""
    now = DenoisingStep(step, generation=generation)
    ahead = slot.next_use(torch.empty(1, mask.heads, 0, 0), now, make)
    use = slot.use_predicted(mask, ahead, make, now)
    slot.keep(None, mock.Mock(branch=None), use)
    return use


def plan_that_differs(rank: int, world: int, odd: int) -> list[str]:
    """Attends four times, in the third with another plan on one rank. Returns what each call raised."""
    session, raised = Session(PREDICTED | {"reuse": 1.0}, f"U{world}R1"), []
    for call in range(4):
        options = {"planner": "contiguous"} if (rank, call) == (odd, 2) else {}
        other = lambda *args, more=options, **given: plan_from_counts(*args, **(given | more))  # noqa: E731
        with mock.patch("dbsp_core.runtime.size.plan_from_counts", other):
            raised.append(said(lambda call=call: session.attend(900.0 - call)))
    dist.barrier()
    return raised


def test_plan_that_differs_on_one_rank_raises_on_all_at_the_same_call(pool):
    for first, second, third, last in pool(3).run(plan_that_differs, 2):
        assert (first, second, last) == ("nothing",) * 3
        assert "the plan differs on" in third


def two_generations(rank: int, world: int, settings: dict[str, Any]) -> list[tuple[bool, float, int]]:
    """Runs two generations of four steps and equal masks.

    Returns by call whether a plan was made, ρ_s in use, and the plan's fingerprint.
    """
    session = Session(PREDICTED | settings, f"U{world}R1", steps=4)
    uses: list[PlanUse] = []
    for step in range(8):
        assert session.attend(900.0 - step % 4) <= 1e-5
        (slot,) = session.inner.passes.last.size.slots.values()
        uses.append(slot.use)
    session.inner.flush()
    assert session.inner.reuse.waits == (8 if settings.get("plan") == "current" else 1)
    return [(use.new, use.counted.rho, use.plan.fingerprint) for use in uses if use.counted is not None]


FIRST = mask_of(6, 4, 4, 2)
"""Heads 0 and 3 go to one column, 1 and 2 to the other: 8 and 8."""
AT_THRESHOLD = mask_of(6, 4, 2, 4)
"""Under that plan 10 and 6: ρ_s = 10 / (16 / 2) = 1.25."""
ABOVE = mask_of(7, 3, 2, 4)
"""Under that plan 11 and 5: ρ_s = 1.375. Planned again: heads 0 and 2, heads 1 and 3, hence 9 and 7."""


def plan_of(mask: BlockMask) -> int:
    return plans_on(mask.grid, "U2R1")(mask.counts.rows, None).fingerprint


OLD, NEW = plan_of(FIRST), plan_of(ABOVE)


def plan_known(slot, mask):
    known = KnownMask(((), "a step's"), 0, shares_plan=False)
    return known, slot.plan_known(known, mask, plans_on(mask.grid, "U2R1"))


def use_known(slot, mask):
    """Uses the plan of a mask that is known, which is made at once."""
    known, use = plan_known(slot, mask)
    slot.keep(known, None, use)
    return use


def test_plan_of_a_known_mask_is_kept_up_to_the_threshold(slot):
    assert use_known(slot, FIRST).new
    use = use_known(slot, AT_THRESHOLD)
    assert (use.plan.fingerprint, use.plan.rho, use.new) == (OLD, 1.25, False)
    plan_known(slot, ABOVE)  # which is not used, and so not kept
    assert use_known(slot, FIRST).plan.fingerprint == OLD
    use = use_known(slot, ABOVE)
    assert (use.plan.fingerprint, use.plan.rho, use.new) == (NEW, 9 / 8, True)
    assert not use_known(slot, ABOVE).new
    for mask in (mask_of(6, 4, 4, 2, grid=BlockGrid.uniform(9 * 16, 16)), mask_of(6, 4, 4)):
        use = use_known(slot, mask)
        assert (use.plan.grid, use.plan.heads, use.new) == (mask.grid, mask.heads, True)


class TestPredictedMasks:
    """Plans of predicted masks: a call uses what the counts of the call before settled."""

    @staticmethod
    def plans(slot, masks):
        return [use_predicted(slot, mask, plans_on(mask.grid, "U2R1")).plan.fingerprint for mask in masks]

    @pytest.mark.parametrize(
        ("masks", "steps", "plans", "new"),
        [
            ((FIRST, ABOVE, ABOVE, ABOVE, FIRST), 5, [OLD, OLD, NEW, NEW, NEW], [True, False, True, False, False]),
            ((FIRST, AT_THRESHOLD, FIRST), 3, [OLD] * 3, [True, False, False]),
            ((FIRST, ABOVE, AT_THRESHOLD, FIRST, ABOVE), 5, None, None),
            ((FIRST, ABOVE, ABOVE) * 2, 3, [OLD, OLD, NEW, NEW, NEW, NEW], None),
            ((FIRST, FIRST, ABOVE, ABOVE) * 2, 4, [OLD, OLD, OLD, NEW, NEW, NEW, NEW, NEW], None),
            ((ABOVE, FIRST, ABOVE, AT_THRESHOLD) * 3, 4, None, None),
            ((FIRST, ABOVE, ABOVE, ABOVE, ABOVE), 2, [OLD, OLD, OLD, NEW, NEW], None),
        ],
        ids=["one call later", "threshold", "back", "next generation", "later change", "three", "changed first mask"],
    )
    def test_plans_are_those_that_the_counts_before_settled(self, slot, masks, steps, plans, new):
        make = plans_on(GRID, "U2R1")
        uses = [use_predicted(slot, mask, make, *divmod(call, steps)) for call, mask in enumerate(masks)]
        slot.counted()
        replayed = replay([mask.counts.rows for mask in masks], 1.25, make, steps=steps)
        found, again = ([(use.plan.fingerprint, use.new) for use in each] for each in (uses, replayed))
        assert found == again
        assert plans in (None, [plan for plan, _ in found])
        assert new in (None, [is_new for _, is_new in found])
        assert slot.statistics.plans == sum(is_new for _, is_new in found)
        assert slot.statistics.rho_sum == sum(use.counted.rho for use in replayed)

    def test_call_with_other_heads_plans_at_once(self, slot):
        """Switches guidance off between two calls, while counts of more heads are being copied."""
        self.plans(slot, [FIRST, ABOVE])
        use = use_predicted(slot, mask_of(6, 4), plans_on(GRID, "U2R1"))
        assert (use.plan.heads, use.new) == (2, True)
        slot.counted()
        assert slot.statistics.counted == 3

    def test_error_in_planning_keeps_the_plan_before(self, slot):
        self.plans(slot, [FIRST, ABOVE])
        with pytest.raises(ZeroDivisionError):
            use_predicted(slot, ABOVE, mock.Mock(side_effect=ZeroDivisionError))
        assert self.plans(slot, [ABOVE]) == [NEW]


def test_second_generation_has_plans_for_the_masks_that_are_expected(threads):
    """The second generation's masks are those of the first: what is expected comes, and no plan lags."""
    for seen in threads(2).run(two_generations, {"reuse": 1.02}):
        lagging = [rho for new, rho, _ in seen if not new]
        assert max(lagging) > 1.02, "plans lag in the first generation"
        assert all(rho <= 1.02 or new for new, rho, _ in seen[4:])
        assert max(rho for _, rho, _ in seen[4:]) < max(rho for _, rho, _ in seen[:4])
    for seen in threads(2).run(two_generations, {"reuse": 9.0}):
        assert [new for new, *_ in seen] == [True] + [False] * 7


def test_current_plans_are_those_of_the_calls_own_masks(threads):
    lagged, current = (threads(3).run(two_generations, {"reuse": 1.0, "plan": plan}) for plan in ("lagged", "current"))
    assert all(calls == of_ranks[0] for of_ranks in (lagged, current) for calls in of_ranks)
    pairs = [(late, own) for (_, late, _), (_, own, _) in zip(lagged[0][:4], current[0][:4], strict=True)]
    assert all(own <= late for late, own in pairs)
    assert sum(own < late for late, own in pairs) >= 2, "lagging must cost balance here"


class TestUsualCounts:
    ROWS = np.arange(12).reshape(2, 6) * 10

    @staticmethod
    def at(step: int, generation: int = 0) -> DenoisingStep:
        return DenoisingStep(step, generation=generation)

    def test_change_between_steps_is_that_of_generations_before(self):
        """Prompts differ by a number of each row; what is added from step to step is the same for all."""
        usual, change = UsualCounts(), np.random.default_rng(0).integers(-5, 6, self.ROWS.shape)
        for prompt in (0, 2, 4):
            usual.add(self.ROWS + 20 + prompt, 3)
            usual.add(self.ROWS + 20 + prompt + change, 5)
        last = self.ROWS + 50
        assert (usual.expected(last, self.at(3), self.at(5)) == last + change).all()
        assert (usual.expected(last, self.at(5), self.at(3)) == last - change).all()
        assert (usual.expected(last, self.at(5), self.at(3, 1)) == self.ROWS + 22).all(), "a generation begins"
        assert (usual.expected(self.ROWS * 0, self.at(3), self.at(5)) == change.clip(0)).all()

    def test_what_is_not_known_does_not_change(self):
        usual = UsualCounts()
        usual.add(self.ROWS, 0)
        for last, now in ((self.at(0), self.at(1)), (self.at(1), self.at(0)), (self.at(4), self.at(5, 1))):
            assert usual.expected(self.ROWS, last, now) is self.ROWS
        fewer = self.ROWS[:1]
        assert usual.expected(fewer, self.at(1), self.at(0, 1)) is fewer, "guidance was switched off"
        usual.add(fewer, 1)
        assert usual.expected(fewer, self.at(0), self.at(1)) is fewer

    def test_means_follow_changes_and_their_memory_is_limited(self, monkeypatch):
        usual = UsualCounts()
        for generation in range(40):
            usual.add(self.ROWS + 8 * (generation >= 20), 0)
        assert (usual.expected(self.ROWS, self.at(1), self.at(0, 1)) >= self.ROWS + 7).all()
        monkeypatch.setattr("dbsp_core.planning.reuse.MOST_BYTES", 3 * self.ROWS.size * 4)
        for step in range(1, 10):
            usual.add(self.ROWS, step)
        assert sorted(usual.by_step) == [0, 1, 2]
