"""Plans are kept while they serve: worked out with two Ulysses columns and two heads each."""

from __future__ import annotations

import numpy as np
import pytest

from dbsp_core import BlockGrid, BlockMask, make_plan
from dbsp_core.reuse import PlanCache

GRID = BlockGrid.uniform(8 * 16, 16)


def mask_of(*work: int, grid: BlockGrid = GRID) -> BlockMask:
    """Heads with so many dense blocks, from the top left on."""
    bits = np.zeros((len(work), grid.nq * grid.nk), dtype=bool)
    for head, dense in zip(bits, work, strict=True):
        head[:dense] = True
    return BlockMask(bits.reshape(-1, grid.nq, grid.nk), grid)


def plan_u2(mask: BlockMask):
    return make_plan(mask, "U2R1", "paper")


FIRST = mask_of(6, 4, 4, 2)
"""Heads 0 and 3 go to one column, 1 and 2 to the other: 8 and 8."""
AT_THRESHOLD = mask_of(6, 4, 2, 4)
"""Under that plan 10 and 6: ρ_s = 10 / (16 / 2) = 1.25."""
ABOVE = mask_of(7, 3, 2, 4)
"""Under that plan 11 and 5: ρ_s = 1.375. Planned anew: heads 0 and 2, heads 1 and 3, hence 9 and 7."""


@pytest.fixture
def cache():
    cache = PlanCache(threshold=1.25)
    assert cache.plan_for(0, FIRST, plan_u2).rho == 1.0
    return cache


def test_a_plan_is_kept_up_to_the_threshold_with_the_numbers_of_the_new_mask(cache):
    first = cache.plan_for(0, FIRST, plan_u2)
    kept = cache.plan_for(0, AT_THRESHOLD, plan_u2)
    assert kept.fingerprint == first.fingerprint
    assert kept.rho == 1.25
    assert (cache.calls, cache.replans) == (3, 1)


def test_above_the_threshold_a_new_plan_is_made_and_kept_from_then_on(cache):
    plan = cache.plan_for(0, ABOVE, plan_u2)
    assert plan.fingerprint == plan_u2(ABOVE).fingerprint != plan_u2(FIRST).fingerprint
    assert plan.rho == 9 / 8
    assert cache.plan_for(0, ABOVE, plan_u2).fingerprint == plan.fingerprint
    assert (cache.calls, cache.replans) == (3, 2)


def test_every_layer_has_a_plan_of_its_own(cache):
    cache.plan_for(1, AT_THRESHOLD, plan_u2)
    assert cache.plan_for(0, FIRST, plan_u2).fingerprint == plan_u2(FIRST).fingerprint
    assert cache.plan_for(1, AT_THRESHOLD, plan_u2).fingerprint == plan_u2(AT_THRESHOLD).fingerprint
    assert (cache.calls, cache.replans) == (4, 2)


@pytest.mark.parametrize(
    "mask", [mask_of(6, 4, 4, 2, grid=BlockGrid.uniform(9 * 16, 16)), mask_of(6, 4, 4)], ids=["grid", "heads"]
)
def test_another_grid_or_number_of_heads_needs_a_new_plan(cache, mask):
    plan = cache.plan_for(0, mask, plan_u2)
    assert (plan.grid, plan.heads) == (mask.grid, mask.heads)
    assert cache.replans == 2
