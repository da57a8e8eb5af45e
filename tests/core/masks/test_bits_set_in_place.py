"""Masks whose bits are set in place: what was counted, compared or planned of the old ones is not taken for them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from dbsp_core import BlockGrid, BlockMask, DualBalancedAttention, SequenceGroup, SequenceLayout, make_plan
from dbsp_core.runtime.tables import dense_spans_of
from dbsp_core.utils.errors import UserError

PLAIN = BlockGrid(tokens=96, text_tokens=0, block_q=8, block_k=8)
PACKED = BlockGrid.packed([BlockGrid.uniform(40, 8), BlockGrid.uniform(56, 8)])


def random_mask(grid: BlockGrid, density: float = 0.2) -> BlockMask:
    shape = (2 * grid.pairs,) if grid.packed_from else (2, grid.nq, grid.nk)
    return BlockMask(torch.rand(shape, generator=torch.Generator().manual_seed(0)) < density, grid)


def whole(mask: BlockMask) -> torch.Tensor:
    return mask.bits


def a_view(mask: BlockMask) -> torch.Tensor:
    return mask.bits.detach().view(-1)


def a_part(mask: BlockMask) -> torch.Tensor:
    return mask.parts[0].bits


OWNER = {grid: np.arange(2 * grid.nq).reshape(2, -1) % 2 for grid in (PLAIN, PACKED)}
DERIVED: dict[str, Callable[[BlockMask], object]] = {
    "fingerprint": lambda mask: mask.fingerprint,
    "rows": lambda mask: mask.counts.rows.tolist(),
    "columns by rank": lambda mask: mask.counts.columns_by_rank(OWNER[mask.grid], 2).tolist(),
    "parts": lambda mask: [part.counts.rows.tolist() for part in mask.parts],
    "fingerprints of parts": lambda mask: [part.fingerprint for part in mask.parts],
    "density": lambda mask: mask.density,
    "dense spans": lambda mask: dense_spans_of(mask, torch.device("cuda")).tolist(),
    "plan": lambda mask: make_plan(mask, "U1R2").work.tolist(),
    "evaluated plan": lambda mask: make_plan(random_mask(mask.grid), "U1R2").counted(mask).work.tolist(),
}


@pytest.mark.parametrize("grid", [PLAIN, PACKED], ids=["plain", "packed"])
@pytest.mark.parametrize("name", DERIVED)
def test_what_follows_from_the_bits_follows_them(name, grid):
    for alias in (whole, a_view, a_part):
        mask = random_mask(grid)
        before = DERIVED[name](mask)
        assert DERIVED[name](mask) == before
        alias(mask).fill_(True)
        after = DERIVED[name](mask)
        assert after != before
        assert after == DERIVED[name](BlockMask(mask.bits.clone(), grid))


def test_bits_made_in_inference_mode_follow_too():
    with torch.inference_mode():
        mask = BlockMask(torch.zeros(2, PLAIN.nq, PLAIN.nk, dtype=torch.bool), PLAIN)
        before = mask.fingerprint, mask.counts.rows.sum()
        mask.bits[0, 0, 0] = True
        assert mask.fingerprint != before[0]
        assert mask.counts.rows.sum() == 1


def test_an_array_that_is_set_later_is_not_the_mask():
    """Nothing tells of what is written to it."""
    bits = np.zeros((2, PLAIN.nq, PLAIN.nk), dtype=bool)
    mask = BlockMask(bits, PLAIN)
    before = mask.fingerprint
    bits[:] = True
    assert not mask.bits.any()
    assert mask.fingerprint == before


@pytest.mark.parametrize("grid", [PLAIN, PACKED], ids=["plain", "packed"])
def test_a_plan_that_leaves_out_keys_which_are_needed_now_is_rejected(grid):
    mask, layout = random_mask(grid, 0.1), SequenceLayout.contiguous(grid.tokens, 2)
    plan = make_plan(mask, "U1R2", layout=layout, keys="needed")
    assert plan.fits(mask)
    mask.bits.fill_(True)
    assert not plan.fits(mask)
    with pytest.raises(UserError, match="the mask needs keys that the plan does not send"):
        DualBalancedAttention.prepare(plan, mask, layout, SequenceGroup(0, 2))


def test_an_executor_goes_on_with_the_mask_it_was_prepared_for():
    mask, layout = random_mask(PLAIN), SequenceLayout.contiguous(96, 1)
    q = torch.randn(1, 2, 96, 16, generator=torch.Generator().manual_seed(1))
    attend = DualBalancedAttention.prepare(make_plan(mask, "U1R1"), mask, layout, SequenceGroup.from_group())
    before = attend(q, q, q)
    mask.bits.fill_(True)
    assert torch.equal(attend(q, q, q), before)
