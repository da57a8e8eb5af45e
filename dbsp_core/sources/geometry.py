"""Masks of patterns that measure distances along lines, from blocks cut into segments. Only numpy.

A line may be the tokens of a frame, a row of tiles or the whole video. A pair of blocks is dense if one token of the
first may attend to one of the second: exact, without looking at pairs of tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dbsp_core.masks.grid import BlockAxis, BlockGrid

__all__ = ["LineSegments", "distances", "line_segments", "reduce_to_blocks"]


@dataclass(frozen=True, eq=False)
class LineSegments:
    """The video blocks of one axis, cut where a line ends.

    Attributes:
        line: int64[n], the line of each segment; `first` and `last` are the positions of its end tokens there.
        begins: int64[video blocks], each block's first segment.
    """

    line: np.ndarray
    first: np.ndarray
    last: np.ndarray
    begins: np.ndarray


def line_segments(axis: BlockAxis, line: np.ndarray, at: np.ndarray) -> LineSegments:
    """The segments of one axis's video blocks.

    `line` and `at` are int64[video tokens] in the order of the blocks: each token's line, and its position there,
    which never falls along the line.
    """
    text_tokens = len(axis.block_of) - len(line)
    block = axis.block_of[text_tokens:]
    new_block = np.diff(block, prepend=-1) != 0
    start = np.flatnonzero(new_block | (np.diff(line, prepend=-1) != 0))
    end = np.append(start[1:], len(line)) - 1
    return LineSegments(line[start], at[start], at[end], np.flatnonzero(new_block[start]))


def distances(q: LineSegments, k: LineSegments) -> np.ndarray:
    """int64[q segments, k segments]: least distance of their positions, whatever their lines; 0 if they overlap."""
    gap = np.maximum(k.first[None] - q.last[:, None], q.first[:, None] - k.last[None])
    return np.maximum(gap, 0)


def reduce_to_blocks(grid: BlockGrid, dense: np.ndarray, q: LineSegments, k: LineSegments) -> np.ndarray:
    """bool[nq, nk]: blocks with a pair of segments in `dense`, bool[q segments, k segments], and all text."""
    rows = np.logical_or.reduceat(dense, q.begins, axis=0)
    bits = np.ones((grid.nq, grid.nk), dtype=bool)
    bits[grid.nq - len(q.begins) :, grid.nk - len(k.begins) :] = np.logical_or.reduceat(rows, k.begins, axis=1)
    return bits
