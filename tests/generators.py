"""Random grids, masks and layouts for property tests."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st

from dbsp_core import BlockGrid, BlockMask, HomeLayout, Strategy
from dbsp_core.home import HOME_ORDERS

SEEDS = st.integers(0, 2**32 - 1)
BLOCK_SIZES = st.integers(1, 24)


def examples(count: int) -> settings:
    """Decorator: that many examples, each as slow as it likes."""
    return settings(max_examples=count, deadline=None)


@st.composite
def grids(draw: st.DrawFn, least_key_blocks: int = 1) -> BlockGrid:
    """Any text length and any two block sizes, with at least so many KV blocks."""
    block_k = draw(BLOCK_SIZES)
    tokens = draw(st.integers((least_key_blocks - 1) * block_k + 1, least_key_blocks * block_k + 100))
    return BlockGrid(tokens, draw(st.integers(0, tokens)), draw(BLOCK_SIZES), block_k)


def strategies(most_ranks: int = 8) -> st.SearchStrategy[Strategy]:
    """Every UxRy."""
    return st.sampled_from([s for world in range(1, most_ranks + 1) for s in Strategy.all_for(world)])


def random_bits(heads: int, grid: BlockGrid, seed: int) -> np.ndarray:
    """bool[heads, nq, nk]: uneven over heads, rows and columns, asymmetric, sometimes with nothing in it."""
    rng = np.random.default_rng(seed)
    head, row, column = (rng.uniform(0, 2, n) for n in (heads, grid.nq, grid.nk))
    wanted = rng.choice([0.0, 0.2, 0.5, 1.0]) * head[:, None, None] * row[None, :, None] * column[None, None, :]
    return rng.random(wanted.shape) < wanted


@dataclass(frozen=True)
class Problem:
    """What a planner is asked."""

    mask: BlockMask
    strategy: Strategy
    home: HomeLayout
    reward: float
    head_cap: bool

    def __repr__(self) -> str:
        return f"{self.strategy} {self.mask.grid} heads={self.mask.heads} reward={self.reward} cap={self.head_cap}"


@st.composite
def layouts(draw: st.DrawFn, grid: BlockGrid, strategy: Strategy) -> HomeLayout:
    """Every named layout, with text among the video or apart from it."""
    return HomeLayout.named(draw(st.sampled_from(list(HOME_ORDERS))), grid, strategy, split_text=draw(st.booleans()))


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    strategy = draw(strategies())
    grid = draw(grids(least_key_blocks=strategy.ring))
    mask = BlockMask(random_bits(draw(st.integers(1, 9)), grid, draw(SEEDS)), grid)
    reward = draw(st.sampled_from([0.0, 0.3, 1.0, 50.0]))
    return Problem(mask, strategy, draw(layouts(grid, strategy)), reward, draw(st.booleans()))
