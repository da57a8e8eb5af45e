"""Token orders against an order written out token by token."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dbsp_core import BlockGrid
from dbsp_core.masks.grid import AXIS_ORDERS
from dbsp_core.planning.planners import balanced_majority_rank, majority_rank
from tests.support.generators import examples
from tests.support.oracle import slot_in_order

SIZES = st.tuples(*[st.integers(1, 7)] * 3)
ORDERS = st.sampled_from(AXIS_ORDERS) | SIZES.map(lambda tile: "tile:{}x{}x{}".format(*tile))


@examples(150)
@given(SIZES, st.integers(0, 9), ORDERS)
def test_standing_is_the_order_written_out(thw, text_tokens, order):
    grid = BlockGrid(text_tokens + int(np.prod(thw)), text_tokens, 4, 4, thw, (order,))
    token_permutation = torch.from_numpy(grid.token_permutation(order).copy())
    assert torch.equal(torch.argsort(token_permutation), slot_in_order(grid, 0))


@pytest.mark.parametrize("order", ["", "tthw", "thx", "tile:4x4", "tile:0x4x4", "tile:4x4x4 "])
def test_unknown_orders_are_rejected(order):
    with pytest.raises(ValueError, match="unknown token order"):
        BlockGrid(24, 0, 4, 4, (2, 3, 4), (order,))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((24, 0, 4, 4, None, ("hwt",)), "need thw"),
        ((25, 0, 4, 4, (2, 3, 4), ("hwt",)), "25 video tokens"),
        ((24, 0, 4, 4, (2, 3, 4), ()), "must not be empty"),
    ],
)
def test_orders_that_do_not_fit_are_rejected(arguments, message):
    with pytest.raises(ValueError, match=message):
        BlockGrid(*arguments)


@examples(100)
@given(st.integers(1, 40), st.integers(1, 8), st.integers(0, 2**32 - 1))
def test_level_residents_share_blocks_equally(blocks, parts, seed):
    tokens = np.random.default_rng(seed).integers(0, 5, (blocks, parts))
    level = balanced_majority_rank(tokens)
    assert np.bincount(level, minlength=parts).max() <= -(-blocks // parts)
    whole = np.eye(parts, dtype=np.int64)[np.arange(blocks) * parts // blocks]  # blocks that lie whole, in even runs
    assert np.array_equal(balanced_majority_rank(whole), majority_rank(whole))
