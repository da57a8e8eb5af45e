"""Random grids, masks and layouts for property tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st

from dbsp_core import BlockGrid, BlockMask, Plan, SequenceLayout, Strategy, make_plan
from dbsp_core.layout.sequence_layout import LAYOUTS
from dbsp_core.planning.planners import PLANNERS
from dbsp_core.sources import MaskRequest
from dbsp_core.sources.base import BlockSizes

SEEDS = st.integers(0, 2**32 - 1)
BLOCK_SIZES = st.integers(1, 24)


def examples(count: int) -> settings:
    """Decorates a test that tries so many examples, each as slow as it likes."""
    return settings(max_examples=count, deadline=None)


@st.composite
def grids(draw: st.DrawFn, least_key_blocks: int = 1, more_tokens: int = 100) -> BlockGrid:
    """Draws any text length and two block sizes, with at least so many KV blocks, and at most so many tokens more."""
    block_q, block_k = (draw(st.integers(1, 24)) for _ in range(2))
    tokens = draw(st.integers((least_key_blocks - 1) * block_k + 1, least_key_blocks * block_k + more_tokens))
    return BlockGrid(tokens, draw(st.integers(0, tokens)), block_q, block_k)


EVERY_STRATEGY = tuple(s for world in range(1, 9) for s in Strategy.all_for(world))
"""Every UxRy on up to 8 ranks."""


def random_bits(heads: int, grid: BlockGrid, seed: int, level: float = 0.5) -> np.ndarray:
    """Draws bool[heads, nq, nk], about `level` of it dense: unequal over heads, rows and columns, asymmetric."""
    rng = np.random.default_rng(seed)
    head, row, column = (rng.uniform(0, 2, n) for n in (heads, grid.nq, grid.nk))
    return rng.random((heads, grid.nq, grid.nk)) < level * head[:, None, None] * row[:, None] * column


@dataclass(frozen=True)
class RandomSource(BlockSizes):
    """Asymmetric, unequal over heads and rows, some of them empty; every head in a token order of its own."""

    seed: int = 0

    def mask(self, request: MaskRequest) -> BlockMask:
        draws = np.random.default_rng(self.seed)
        orders = tuple(draws.choice(["thw", "hwt", "wth"], request.heads).tolist())
        grid = replace(self.grid(request), orders=orders)
        level = draws.uniform(0.1, 0.9, (request.heads, grid.nq, 1))
        bits = draws.random((request.heads, grid.nq, grid.nk)) < level
        bits[draws.random((request.heads, grid.nq)) < 0.15] = False
        return BlockMask(bits, grid)


@st.composite
def masks(
    draw: st.DrawFn, heads: int = 4, sequences: int = 3, least_key_blocks: int = 1, more_tokens: int = 100
) -> BlockMask:
    """Draws bits of up to so many heads, of one sequence or of several that are packed."""
    first, seed, count = draw(grids(least_key_blocks, more_tokens)), draw(SEEDS), draw(st.integers(1, heads))
    sizes = [(first.tokens, first.text_tokens)]
    for _ in range(draw(st.integers(1, sequences)) - 1):
        tokens = draw(st.integers(1, 20 + more_tokens))
        sizes.append((tokens, draw(st.integers(0, tokens))))
    each = [BlockGrid(*size, first.block_q, first.block_k) for size in sizes]
    return BlockMask.packed([BlockMask(random_bits(count, grid, seed + at), grid) for at, grid in enumerate(each)])


@st.composite
def layouts(draw: st.DrawFn, grid: BlockGrid, strategy: Strategy) -> SequenceLayout:
    """Draws a named layout, with text among the video or apart from it, or tokens in no order at all."""
    name = draw(st.sampled_from([*LAYOUTS, "shuffled"]))
    if name == "shuffled":
        order = np.random.default_rng(draw(SEEDS)).permutation(grid.tokens)
        return SequenceLayout.from_streams([order], strategy.world)
    streams = draw(st.sampled_from([None, "first", "last"])) if grid.text_tokens < grid.tokens else None
    return SequenceLayout.named(name, grid, strategy, streams=streams)


@dataclass(frozen=True)
class Problem:
    """The arguments of `make_plan`."""

    mask: BlockMask
    strategy: Strategy
    planner: str
    layout: SequenceLayout

    def plan(self) -> Plan:
        return make_plan(self.mask, self.strategy, self.planner, layout=self.layout)

    def __repr__(self) -> str:
        return f"{self.strategy} planner={self.planner} heads={self.mask.heads} {self.mask.grid}"


@st.composite
def problems(draw: st.DrawFn, strategy: Strategy, planners: Sequence[str] = tuple(PLANNERS)) -> Problem:
    planner = draw(st.sampled_from(planners))
    grid = draw(grids(strategy.ring))
    level = draw(st.sampled_from([0.5, 0.1, 1.0, 0.0]))
    return Problem(
        mask=BlockMask(random_bits(draw(st.integers(1, 9)), grid, draw(SEEDS), level), grid),
        strategy=strategy,
        planner=planner,
        layout=draw(layouts(grid, strategy)),
    )
