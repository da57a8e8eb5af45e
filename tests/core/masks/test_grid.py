"""Block grids: tokens in token order cut into blocks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given

from dbsp_core import BlockGrid
from tests.support.generators import examples, grids


@given(grids())
@examples(100)
def test_blocks_tile_the_tokens_in_order(grid):
    for axis, block in ((grid.q_axis, grid.block_q), (grid.k_axis, grid.block_k)):
        tokens = [
            token for start, n in zip(axis.starts, axis.lengths, strict=True) for token in range(start, start + n)
        ]
        assert tokens == list(range(grid.tokens))
        assert axis.lengths.min() >= 1
        assert axis.lengths.max() <= block
        assert axis.block == block


@given(grids())
@examples(100)
def test_no_block_holds_both_text_and_video(grid):
    for axis in (grid.q_axis, grid.k_axis):
        ends = axis.starts + axis.lengths
        assert all(
            end <= grid.text_tokens or start >= grid.text_tokens for start, end in zip(axis.starts, ends, strict=True)
        )


@given(grids())
@examples(100)
def test_only_the_last_block_of_a_segment_may_be_short(grid):
    for axis in (grid.q_axis, grid.k_axis):
        ends = axis.starts + axis.lengths
        assert set(ends[axis.lengths < axis.block]) <= {grid.text_tokens, grid.tokens}


@given(grids())
@examples(50)
def test_block_of_names_the_block_of_each_token(grid):
    for axis in (grid.q_axis, grid.k_axis):
        place = np.arange(grid.tokens) - axis.starts[axis.block_of]
        assert (place >= 0).all()
        assert (place < axis.lengths[axis.block_of]).all()


def test_a_text_segment_starts_its_own_blocks():
    # 3 text tokens | 7 video tokens in blocks of 4: [0 1 2] [3 4 5 6] [7 8 9]; in blocks of 2: [0 1] [2] [3 4] …
    grid = BlockGrid(tokens=10, text_tokens=3, block_q=4, block_k=2)
    assert grid.q_axis.starts.tolist() == [0, 3, 7]
    assert grid.q_axis.lengths.tolist() == [3, 4, 3]
    assert grid.k_axis.starts.tolist() == [0, 2, 3, 5, 7, 9]
    assert (grid.nq, grid.nk) == (3, 6)


def test_uniform_has_one_block_size_unless_told_otherwise():
    assert BlockGrid.uniform(100, 16, 5) == BlockGrid(100, 5, 16, 16)
    assert BlockGrid.uniform(100, 16) != BlockGrid.uniform(100, 32)


@pytest.mark.parametrize(
    ("sizes", "named"),
    [
        ({"tokens": 0}, "tokens=0"),
        ({"tokens": 8, "text_tokens": 9}, "text_tokens=9"),
        ({"tokens": 8, "text_tokens": -1}, "text_tokens=-1"),
        ({"tokens": 8, "block": 0}, "block_q=0"),
    ],
)
def test_sizes_that_make_no_grid_raise(sizes, named):
    with pytest.raises(ValueError, match=named):
        BlockGrid.uniform(**sizes)


@pytest.mark.parametrize(
    ("block_q", "block_k", "named"), [(0, 4, "block_q=0"), (4, 0, "block_k=0"), (4, -4, "block_k=-4")]
)
def test_block_sizes_that_make_no_grid_raise(block_q, block_k, named):
    with pytest.raises(ValueError, match=named):
        BlockGrid(8, 0, block_q, block_k)
