"""Sequence layouts: which rank holds which tokens; and strategies UxRy."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dbsp_core import BlockGrid, SequenceLayout, Strategy
from tests.support.generators import EVERY_STRATEGY, examples, grids, layouts


@st.composite
def problems(draw):
    """Draws (grid, strategy, layout)."""
    grid, strategy = draw(grids()), draw(st.sampled_from(EVERY_STRATEGY))
    return grid, strategy, draw(layouts(grid, strategy))


@given(problems())
@examples(80)
def test_every_token_is_in_exactly_one_slot(problem):
    """Checks also that tokens of a rank are in the order of their slots."""
    grid, strategy, layout = problem
    held = [
        (rank, slot, token)
        for rank in range(layout.world)
        for token, slot in zip(*layout.tokens_at(rank), strict=True)
    ]
    assert held == sorted(held)
    assert sorted(token for *_, token in held) == list(range(grid.tokens))
    assert len({(rank, slot) for rank, slot, _ in held}) == grid.tokens
    assert all(0 <= slot < layout.shard for _, slot, _ in held)
    assert (layout.world, layout.tokens) == (strategy.world, grid.tokens)


def test_layouts_by_hand():
    # The coarser blocks are striped, so that none is cut.
    layout = SequenceLayout.striped(BlockGrid(32, 0, block_q=2, block_k=8), Strategy(1, 2))
    assert layout.rank.tolist() == (np.arange(32) // 8 % 2).tolist()
    # 5 text tokens on 2 ranks: 3 + 2 and one of padding; 6 video tokens: 3 + 3.
    layout = SequenceLayout.named("contiguous", BlockGrid(11, 5, 4, 4), Strategy(2, 1), streams="first")
    assert [a.tolist() for a in layout.tokens_at(0)] == [[0, 1, 2, 5, 6, 7], [0, 1, 2, 3, 4, 5]]
    assert [a.tolist() for a in layout.tokens_at(1)] == [[3, 4, 8, 9, 10], [0, 1, 3, 4, 5]]
    assert layout.shard == 6
    layout = SequenceLayout.named("contiguous", BlockGrid(11, 5, 4, 4), Strategy(2, 1), streams="last")
    assert [a.tolist() for a in layout.tokens_at(0)] == [[5, 6, 7, 0, 1, 2], [0, 1, 2, 3, 4, 5]]
    assert [a.tolist() for a in layout.tokens_at(1)] == [[8, 9, 10, 3, 4], [0, 1, 2, 3, 4]]


def test_bad_layouts_raise():
    for rank, local, world in (
        ([0, 0, 1], [0, 0, 0], 2),  # two tokens at one slot
        ([0, 1, 2], [0, 0, 0], 2),  # a rank that is not there
        ([0, -1, 1], [0, 0, 0], 2),
        ([0, 0, 1], [0, 2, 0], 2),  # a slot beyond the shard
        ([0, 0, 1], [0, -1, 0], 2),
        ([0, 0, 1], [0, 1, 0], 0),  # no ranks at all
    ):
        with pytest.raises(ValueError, match="sequence layout"):
            SequenceLayout(np.array(rank), np.array(local), world, shard=2)
    for streams in ([[0, 1, 1]], [[0, 1], [1, 2]], [[0, 1, 3]]):
        with pytest.raises(ValueError, match="sequence layout"):
            SequenceLayout.from_streams([np.array(stream) for stream in streams], 2)
    with pytest.raises(ValueError, match=r"'diagonal'; use one of contiguous, striped$"):
        SequenceLayout.named("diagonal", BlockGrid.uniform(8, 4), Strategy(1, 1))
    with pytest.raises(ValueError, match="at least one rank, got 0"):
        SequenceLayout.contiguous(10, 0)


def test_strategies_are_read_listed_and_required_for_a_world():
    for text in ("U4R2", "u4r2", " U4R2\n", Strategy(4, 2)):
        assert Strategy.parse(text) == Strategy(ulysses=4, ring=2)
    for text in ("", "U4", "R2U4", "U4xR2", "U-4R2", "U4R2R2", "U4.0R2"):
        with pytest.raises(ValueError, match="not of the form UxRy, for example U4R2"):
            Strategy.parse(text)
    every = {world: [str(strategy) for strategy in Strategy.all_for(world)] for world in (1, 6, 7)}
    assert every == {1: ["U1R1"], 6: ["U6R1", "U3R2", "U2R3", "U1R6"], 7: ["U7R1", "U1R7"]}
    Strategy(4, 2).require_world(8)
    with pytest.raises(ValueError, match="needs 4·2 = 8 GPUs, got 6; use one of U6R1, U3R2, U2R3, U1R6"):
        Strategy(4, 2).require_world(6)
