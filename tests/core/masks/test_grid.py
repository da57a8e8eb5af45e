"""Block grids: tokens in token order cut into blocks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given

from dbsp_core import BlockGrid
from tests.support.generators import examples, grids


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
        place = np.arange(grid.tokens) - axis.starts[axis.block_of]
        assert ((place >= 0) & (place < axis.lengths[axis.block_of])).all()


def test_a_text_segment_starts_its_own_blocks():
    # 3 text tokens | 7 video tokens in blocks of 4: [0 1 2] [3 4 5 6] [7 8 9]; in blocks of 2: [0 1] [2] [3 4] …
    grid = BlockGrid(tokens=10, text_tokens=3, block_q=4, block_k=2)
    assert grid.q_axis.starts.tolist() == [0, 3, 7]
    assert grid.q_axis.lengths.tolist() == [3, 4, 3]
    assert grid.k_axis.starts.tolist() == [0, 2, 3, 5, 7, 9]
    assert (grid.nq, grid.nk) == (3, 6)


@pytest.mark.parametrize(
    ("sizes", "named"),
    [
        ((0, 0, 4, 4), "tokens=0"),
        ((8, 9, 4, 4), "text_tokens=9"),
        ((8, -1, 4, 4), "text_tokens=-1"),
        ((8, 0, 0, 4), "block_q=0"),
        ((8, 0, 4, 0), "block_k=0"),
        ((8, 0, 4, -4), "block_k=-4"),
    ],
)
def test_sizes_that_make_no_grid_raise(sizes, named):
    with pytest.raises(ValueError, match=named):
        BlockGrid(*sizes)
