"""Block grids: tokens in token order cut into blocks."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dbsp_core import BlockGrid
from dbsp_core.masks.grid import AXIS_ORDERS
from dbsp_core.planning.planners import balanced_majority_rank, majority_rank
from tests.support.generators import examples, grids
from tests.support.oracle import position_in_order

SIZES = st.tuples(*[st.integers(1, 7)] * 3)
ORDERS = st.sampled_from(AXIS_ORDERS) | SIZES.map(lambda tile: "tile:{}x{}x{}".format(*tile))


@examples(150)
@given(SIZES, st.integers(0, 9), ORDERS)
def test_token_permutation_equals_the_order_written_out(thw, text_tokens, order):
    grid = BlockGrid(text_tokens + int(np.prod(thw)), text_tokens, 4, 4, thw, (order,))
    token_permutation = torch.from_numpy(grid.token_permutation(order).copy())
    assert torch.equal(torch.argsort(token_permutation), position_in_order(grid, 0))


@examples(100)
@given(st.integers(1, 40), st.integers(1, 8), st.integers(0, 2**32 - 1))
def test_level_residents_share_blocks_equally(blocks, parts, seed):
    tokens = np.random.default_rng(seed).integers(0, 5, (blocks, parts))
    level = balanced_majority_rank(tokens)
    assert np.bincount(level, minlength=parts).max() <= -(-blocks // parts)
    whole = np.eye(parts, dtype=np.int64)[np.arange(blocks) * parts // blocks]  # blocks that lie whole, in even runs
    assert np.array_equal(balanced_majority_rank(whole), majority_rank(whole))


@given(grids())
@examples(150)
def test_blocks_tile_text_and_then_video_in_order_and_only_the_last_of_each_may_be_short(grid):
    for axis, block in ((grid.q_axis, grid.block_q), (grid.k_axis, grid.block_k)):
        ends = axis.starts + axis.lengths
        tokens = [token for start, end in zip(axis.starts, ends, strict=True) for token in range(start, end)]
        assert tokens == list(range(grid.tokens))
        assert axis.lengths.min() >= 1
        assert axis.lengths.max() <= block == axis.block
        assert ((ends <= grid.text_tokens) | (axis.starts >= grid.text_tokens)).all()
        assert set(ends[axis.lengths < block]) <= {grid.text_tokens, grid.tokens}
        offset = np.arange(grid.tokens) - axis.starts[axis.block_of]
        assert ((offset >= 0) & (offset < axis.lengths[axis.block_of])).all()


VIDEO = (24, 0, 4, 4, (2, 3, 4))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 0, 4, 4), "tokens=0"),
        ((8, 9, 4, 4), "text_tokens=9"),
        ((8, 0, 0, 4), "block_q=0"),
        ((8, 0, 4, -4), "block_k=-4"),
        *(
            ((*VIDEO, (order,)), "unknown token order")
            for order in ("", "tthw", "thx", "tile:4x4", "tile:0x4x4", "tile:4x4x4 ")
        ),
        ((24, 0, 4, 4, None, ("hwt",)), "need thw"),
        ((25, 0, 4, 4, (2, 3, 4), ("hwt",)), "25 video tokens"),
        ((*VIDEO, ()), "must not be empty"),
    ],
)
def test_sizes_and_orders_that_make_no_grid_raise(arguments, message):
    with pytest.raises(ValueError, match=message):
        BlockGrid(*arguments)
