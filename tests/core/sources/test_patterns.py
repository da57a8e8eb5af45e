"""Sources window (with tiles), radial and svg, against masks of tokens written out from their papers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dbsp_core import BlockGrid
from dbsp_core.sources import MaskRequest, RadialSource, SvgSource, WindowSource
from tests.support.generators import BLOCK_SIZES, examples
from tests.support.oracle import position_in_order

SIZES = st.tuples(*[st.integers(1, 5)] * 3)
WAN = MaskRequest(layer=0, heads=40, thw=(21, 45, 80))


Position = tuple[int, int, int]
Rule = Callable[[Position, Position], bool]
"""rule(query's (t, h, w), key's (t, h, w)): whether the query may attend to the key."""


def sliding_tiles(thw: Position, window: Position, tile: Position) -> Rule:
    """Returns Sliding Tile Attention, Zhang et al. 2025: odd windows have their middle clamped into the video, so that
    the window lies within it; even ones begin window / 2 tiles before the query's, or as near as they fit."""

    def sees(q: int, k: int, size: int, window: int, tile: int) -> bool:
        tiles = math.ceil(size / tile)
        q, k = q // tile, k // tile
        if window >= tiles:
            return True
        if window % 2:
            middle = min(max(q, window // 2), tiles - 1 - window // 2)
            return abs(middle - k) <= window // 2
        first = max(0, min(q - window // 2, tiles - window))
        return first <= k < first + window

    return lambda q, k: all(map(sees, q, k, thw, window, tile))


def tiles_near(thw: Position, window: Position, tile: Position) -> Rule:
    """Returns tiles at most ⌊window / 2⌋ away along each axis, as NABLA's window has them: cut off at borders."""
    return lambda q, k: all(abs(a // t - b // t) <= w // 2 for a, b, w, t in zip(q, k, window, tile, strict=True))


def radial(thw: Position, width: float, decay: float, sink_frames: int, block: int) -> Rule:
    """Returns Radial Attention, Li et al. 2025, §4: a block for its 1, the thinnest band there is,
    and `decay` for its halving."""
    s = thw[1] * thw[2]

    def rule(q: Position, k: Position) -> bool:
        distance = abs(q[0] - k[0])
        octave = int(math.log2(max(distance, 1)))
        band = s * width * math.prod([decay] * octave)
        apart = abs((q[1] * thw[2] + q[2]) - (k[1] * thw[2] + k[2]))
        if k[0] < sink_frames:
            return True
        if band >= block:
            return apart + 1 <= band
        return distance % math.ceil(block / band) == 0 and apart + 1 <= block

    return rule


def spatial(frames: int, sink_frames: int) -> Rule:
    return lambda q, k: abs(q[0] - k[0]) <= frames // 2 or k[0] < sink_frames


def temporal(thw: Position, band: float) -> Rule:
    half = math.floor(math.floor(band * thw[1] * thw[2]) / 2)
    return lambda q, k: abs((q[1] - k[1]) * thw[2] + q[2] - k[2]) <= half


def active_blocks(rules: list[Rule], grid: BlockGrid, request: MaskRequest) -> np.ndarray:
    """Returns bool[H, nq, nk]: for each head's rule, the blocks that hold an allowed pair of tokens, or any text."""
    bits = np.zeros((len(rules), grid.nq, grid.nk), dtype=bool)
    tokens = [None] * request.text_tokens + list(itertools.product(*map(range, request.thw)))
    for head, rule in enumerate(rules):
        positions = position_in_order(grid, head).tolist()
        rows, columns = (
            [
                next(b for b, start in reversed(list(enumerate(axis.starts))) if start <= position)
                for position in positions
            ]
            for axis in (grid.q_axis, grid.k_axis)
        )
        for (row, q), (column, k) in itertools.product(
            zip(rows, tokens, strict=True), zip(columns, tokens, strict=True)
        ):
            if not bits[head, row, column] and (q is None or k is None or rule(q, k)):
                bits[head, row, column] = True
    return bits


@st.composite
def requests(draw, most_heads=1):
    return MaskRequest(0, draw(st.integers(1, most_heads)), draw(SIZES), draw(st.integers(0, 9)))


@given(requests(), BLOCK_SIZES, BLOCK_SIZES, SIZES, SIZES, st.booleans())
@examples(90)
def test_tiles_are_those_of_the_formula(request, block_q, block_k, window, tile, shifted):
    mask = WindowSource(block_q, block_k, window, tile, shifted).mask(request)
    rule = (sliding_tiles if shifted else tiles_near)(request.thw, window, tile)
    assert np.array_equal(mask.bits.numpy(), active_blocks([rule], mask.grid, request))


class TestRadial:
    @given(
        requests(),
        BLOCK_SIZES,
        BLOCK_SIZES,
        st.sampled_from([1.0, 0.5, 0.3, 2.0, 0.01]),
        st.sampled_from([0.5, 0.25, 0.7, 1.0]),
        st.integers(0, 2),
        st.integers(1, 19),
    )
    @examples(50)
    def test_blocks_are_those_of_the_formula(self, request, block_q, block_k, width, decay, sink_frames, frames):
        request = replace(request, thw=(frames, *(min(size, 3) for size in request.thw[1:])))
        mask = RadialSource(block_q, block_k, width, decay, sink_frames).mask(request)
        rule = radial(request.thw, width, decay, sink_frames, max(block_q, block_k))
        assert np.array_equal(mask.bits.numpy(), active_blocks([rule], mask.grid, request))


class TestSvg:
    @given(
        requests(most_heads=4),
        BLOCK_SIZES,
        BLOCK_SIZES,
        st.integers(1, 5),
        st.floats(0.01, 1),
        st.integers(0, 2),
        st.floats(0, 1),
    )
    @examples(50)
    def test_blocks_are_those_of_the_formula(self, request, block_q, block_k, frames, band, sink_frames, share):
        source = SvgSource(block_q, block_k, frames, band, sink_frames, share)
        mask = source.mask(request)
        rules = [
            temporal(request.thw, band) if is_temporal else spatial(frames, sink_frames)
            for is_temporal in source.temporal(request.heads)
        ]
        assert np.array_equal(mask.bits.numpy(), active_blocks(rules, mask.grid, request))

    def test_missing_head_raises(self):
        with pytest.raises(ValueError, match="has a head that the model lacks; its 4 heads are 0 to 3"):
            SvgSource(temporal_heads=(1, 4)).grid(MaskRequest(0, 4, (2, 2, 2)))
