"""Mask sources: what each promises about its masks."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dbsp_core import BlockGrid, BlockMask, save_mask
from dbsp_core.sources import (
    CallableSource,
    DenseSource,
    FileSource,
    MaskRequest,
    RadialSource,
    SvgSource,
    SyntheticSource,
    WindowSource,
)
from tests.support.generators import BLOCK_SIZES, examples, random_bits

REQUEST = MaskRequest(layer=0, heads=3, thw=(3, 4, 5), text_tokens=7)


@pytest.mark.parametrize(
    ("source", "orders"),
    [
        (DenseSource(16, 8), ("thw",)),
        (WindowSource(16, 8), ("thw",)),
        (WindowSource(16, 8, tile=(1, 4, 2)), ("tile:1x4x2",)),
        (SyntheticSource(16, 8), ("thw",)),
        (RadialSource(16, 8), ("thw",)),
        (SvgSource(16, 8), ("thw", "hwt", "hwt")),
        (CallableSource(16, 8, "tests.support.user_masks:band", token_orders=("wht",)), ("wht",)),
    ],
    ids=repr,
)
def test_mask_is_on_the_grid_of_its_source(source, orders):
    grid = source.grid(REQUEST)
    mask = source.mask(REQUEST)
    assert grid == mask.grid == BlockGrid(67, 7, block_q=16, block_k=8, thw=(3, 4, 5), orders=orders)
    assert mask.heads == 3


@pytest.mark.parametrize("change", [{"heads": 4}, {"thw": (3, 4, 6)}, {"text_tokens": 8}, {"text_tokens": 0}])
def test_file_for_another_request_raises_with_its_name(tmp_path, change):
    path, grid = str(tmp_path / "masks.safetensors"), BlockGrid(67, 7, block_q=16, block_k=8)
    save_mask(path, BlockMask(random_bits(3, grid, 0), grid))
    for ask in (FileSource(path).grid, FileSource(path).mask):
        with pytest.raises(ValueError, match=r"is for 3 heads and 67 tokens \(7 of text\), the model") as raised:
            ask(replace(REQUEST, **change))
        assert path in str(raised.value)


@st.composite
def windows(draw):
    """Draws (source, request), small enough to look at every pair of tokens."""
    window = tuple(draw(st.tuples(*[st.integers(1, 5)] * 3)))
    thw = tuple(draw(st.tuples(*[st.integers(1, 4)] * 3)))
    source = WindowSource(draw(BLOCK_SIZES), draw(BLOCK_SIZES), window)
    return source, MaskRequest(0, draw(st.integers(1, 2)), thw, draw(st.integers(0, 9)))


def positions_by_block(axis, request):
    """Returns the (t, h, w) of each token by block of video, or None for a block of text."""
    video = list(itertools.product(*map(range, request.thw)))
    blocks = []
    for start, length in zip(axis.starts, axis.lengths, strict=True):
        first = start - request.text_tokens
        blocks.append(None if first < 0 else np.array(video[first : first + length]))
    return blocks


@given(windows())
@examples(80)
def test_block_is_active_iff_the_boxes_of_its_tokens_are_within_the_window(problem):
    source, request = problem
    mask = source.mask(request)
    rows, columns = (positions_by_block(axis, request) for axis in (mask.grid.q_axis, mask.grid.k_axis))
    for i, j in np.ndindex(len(rows), len(columns)):
        q, k = rows[i], columns[j]
        dense = q is None or k is None
        if not dense:
            gap = np.maximum(k.min(axis=0) - q.max(axis=0), q.min(axis=0) - k.max(axis=0))
            dense = all(2 * gap < np.array(source.window) + 1 - np.array(source.window) % 2)
        assert (mask.bits[:, i, j] == bool(dense)).all()
