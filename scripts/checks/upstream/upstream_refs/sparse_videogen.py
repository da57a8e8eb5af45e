"""Source `svg` against Sparse VideoGen's own masks (svg-project/Sparse-VideoGen)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dbsp_core import BlockGrid
from dbsp_core.sources.frame_patterns import (
    TIME_FASTEST,
    distances,
    line_segments,
    reduce_to_blocks,
    spatial_bits,
    temporal_bits,
)
from scripts.checks.upstream.upstream_refs.finding import Finding, compared, make_importable

THW, TEXT, BLOCK, SPARSITY = (9, 16, 24), 226, 128, 0.3


def findings(folder: Path) -> Iterator[Finding]:
    make_importable(folder, "flashinfer", "loguru", "termcolor", "cuvs")
    from svg.models.cog.placement import token_reorder_to_token_major
    from svg.models.wan.utils import generate_temporal_head_mask_mod, sparsity_to_width

    frames, frame = THW[0], THW[1] * THW[2]
    video = frames * frame
    numbers = torch.arange(TEXT + video).view(1, 1, -1, 1)
    theirs = token_reorder_to_token_major(numbers.clone(), TEXT, video, frames, frame).flatten().numpy()
    with_text = BlockGrid(TEXT + video, TEXT, BLOCK, BLOCK, THW)
    same = theirs == with_text.token_permutation(TIME_FASTEST)
    yield compared(
        "Sparse-VideoGen", folder, "order of a temporal head's tokens", same, np.ones_like(same), unit="tokens"
    )

    width = sparsity_to_width(SPARSITY, 0, frames, frame)
    rule = generate_temporal_head_mask_mod(0, 0, frames, frame, mul=width)
    band = _blocks(rule, video)
    grid = BlockGrid(video, 0, BLOCK, BLOCK, THW)
    own = _as_a_function(grid, reach=math.ceil(width * frame / 128) * 128, sink=frame)
    yield compared("Sparse-VideoGen", folder, "wan, its rule as a function for source callable", band, own)
    reach = round(width)
    note = (
        "theirs: tokens at most a number of tokens away, rounded up to 128, wherever in their frames; ours, as in the "
        "paper: whole frames"
    )
    spatial = spatial_bits(grid, THW, frames=2 * reach + 1, sink_frames=1)
    yield compared("Sparse-VideoGen", folder, f"wan, spatial head, {2 * reach + 1} frames", band, spatial, note)
    note = (
        "theirs: the spatial head's band in this order, with its first columns, which are the first positions of all "
        "frames, as a sink; ours: the band alone"
    )
    share = min(1.0, 2 * width / frames)
    temporal = temporal_bits(grid, THW, share)
    yield compared("Sparse-VideoGen", folder, f"wan, temporal head, bandwidth {share:.3f}", band, temporal, note)


def _as_a_function(grid: BlockGrid, reach: int, sink: int) -> np.ndarray:
    """Returns bool[nq, nk]: its rule in the words of docs/masks.md, "Write your own"."""
    position = np.arange(grid.tokens)
    q, k = (line_segments(axis, line=np.zeros_like(position), at=position) for axis in (grid.q_axis, grid.k_axis))
    return reduce_to_blocks(grid, (distances(q, k) <= reach) | (k.first < sink), q, k)


def _blocks(rule: Callable[..., Any], tokens: int) -> np.ndarray:
    """Returns bool[n, n]: blocks that hold a pair of tokens that the rule allows."""
    position = torch.arange(tokens)
    dense = rule(0, 0, position[:, None], position[None]).numpy()
    starts = np.arange(0, tokens, BLOCK)
    return np.logical_or.reduceat(np.logical_or.reduceat(dense, starts, axis=0), starts, axis=1)
