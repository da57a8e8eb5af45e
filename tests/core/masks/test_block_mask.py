"""Block masks on a grid."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest
import torch

from dbsp_core import BlockGrid, BlockMask, DualBalancedAttention, SequenceGroup, SequenceLayout, make_plan
from dbsp_core.masks.mask_counts import MaskCounts, _columns_on_device
from dbsp_core.runtime.tables import dense_spans_of
from dbsp_core.utils.errors import UserError

PLAIN = BlockGrid(tokens=96, text_tokens=0, block_q=8, block_k=8)
PACKED = BlockGrid.packed([BlockGrid.uniform(40, 8), BlockGrid.uniform(56, 8)])


def random_mask(grid: BlockGrid, density: float = 0.2) -> BlockMask:
    shape = (2 * grid.pairs,) if grid.packed_from else (2, grid.nq, grid.nk)
    return BlockMask(torch.rand(shape, generator=torch.Generator().manual_seed(0)) < density, grid)


ALIASES: tuple[Callable[[BlockMask], torch.Tensor], ...] = (
    lambda mask: mask.bits,
    lambda mask: mask.bits.detach().view(-1),
    lambda mask: mask.parts[0].bits,
)
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


every_grid = pytest.mark.parametrize("grid", [PLAIN, PACKED], ids=["plain", "packed"])


@every_grid
def test_derived_values_follow_bits_changed_in_place(grid):
    for alias, (name, derived) in itertools.product(ALIASES, DERIVED.items()):
        mask = random_mask(grid)
        before = derived(mask)
        assert derived(mask) == before, name
        alias(mask).fill_(True)
        assert before != derived(mask) == derived(BlockMask(mask.bits.clone(), grid)), name


@every_grid
def test_plan_without_keys_that_changed_bits_need_is_rejected(grid):
    mask, layout = random_mask(grid, 0.1), SequenceLayout.contiguous(grid.tokens, 2)
    plan = make_plan(mask, "U1R2", layout=layout, keys="needed")
    assert plan.fits(mask)
    mask.bits.fill_(True)
    assert not plan.fits(mask)
    with pytest.raises(UserError, match="the mask needs keys that the plan does not send"):
        DualBalancedAttention.prepare(plan, mask, layout, SequenceGroup(0, 2))


def test_executor_keeps_the_mask_it_was_prepared_for():
    mask, layout = random_mask(PLAIN), SequenceLayout.contiguous(96, 1)
    q = torch.randn(1, 2, 96, 16, generator=torch.Generator().manual_seed(1))
    attend = DualBalancedAttention.prepare(make_plan(mask, "U1R1"), mask, layout, SequenceGroup.from_group())
    before = attend(q, q, q)
    mask.bits.fill_(True)
    assert torch.equal(attend(q, q, q), before)


def test_columns_by_rank_are_counted_identically_by_numpy_and_on_a_device():
    draws = np.random.default_rng(0)
    parts = [torch.from_numpy(draws.random((3, rows, columns)) < 0.1) for rows, columns in ((40, 30), (300, 7))]
    owner, counts = draws.integers(0, 5, (3, 340)), MaskCounts(*parts)
    owners = torch.from_numpy(owner).split([40, 300], dim=1)
    by_rank = torch.cat([_columns_on_device(*one, 5) for one in zip(parts, owners, strict=True)], dim=2)
    assert np.array_equal(by_rank.numpy(), counts.columns_by_rank(owner, 5))
    assert by_rank.sum() == sum(int(part.sum()) for part in parts)


@pytest.mark.parametrize("shape", [(2, 2, 3), (3, 2), (1, 2, 3, 2), (0, 3, 2)])
def test_shape_that_does_not_fit_raises_with_the_expected_one(shape):
    with pytest.raises(ValueError, match=r"does not fit 10 tokens in blocks of 4×5: expected \[heads, 3, 2\]"):
        BlockMask(torch.ones(shape, dtype=torch.bool), BlockGrid(10, 0, 4, 5))
