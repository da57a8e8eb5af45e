"""Static masks by distance in frames: radial attention, and SVG's spatial and temporal heads."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import torch

from dbsp_core.masks.block_mask import BlockMask
from dbsp_core.masks.grid import BlockAxis, BlockGrid
from dbsp_core.sources.base import BlockSizes, MaskRequest
from dbsp_core.utils.errors import UserError, require_value


@dataclass(frozen=True, eq=False)
class LineSegments:
    """Video blocks of one axis, cut at ends of lines."""

    line: np.ndarray  # int64[n], the line of each segment
    first: np.ndarray  # int64[n], position of its first token on the line
    last: np.ndarray  # int64[n], position of its last token
    begins: np.ndarray  # int64[video blocks], each block's first segment


def line_segments(axis: BlockAxis, line: np.ndarray, at: np.ndarray) -> LineSegments:
    """Returns the segments of one axis's video blocks.

    `line` and `at` are int64[video tokens] in block order: each token's line, and its position there, non-decreasing
    along the line.
    """
    text_tokens = len(axis.block_of) - len(line)
    block = axis.block_of[text_tokens:]
    new_block = np.diff(block, prepend=-1) != 0
    start = np.flatnonzero(new_block | (np.diff(line, prepend=-1) != 0))
    end = np.append(start[1:], len(line)) - 1
    return LineSegments(line[start], at[start], at[end], np.flatnonzero(new_block[start]))


def distances(q: LineSegments, k: LineSegments) -> np.ndarray:
    """Returns the least distance of positions, int64[q segments, k segments]; 0 if they overlap."""
    gap = np.maximum(k.first[None] - q.last[:, None], q.first[:, None] - k.last[None])
    return np.maximum(gap, 0)


def reduce_to_blocks(grid: BlockGrid, dense: np.ndarray, q: LineSegments, k: LineSegments) -> np.ndarray:
    """Reduces bool[q segments, k segments] to blocks, bool[nq, nk], and adds all text."""
    rows = np.logical_or.reduceat(dense, q.begins, axis=0)
    bits = np.ones((grid.nq, grid.nk), dtype=bool)
    bits[grid.nq - len(q.begins) :, grid.nk - len(k.begins) :] = np.logical_or.reduceat(rows, k.begins, axis=1)
    return bits


@dataclass(frozen=True)
class RadialSource(BlockSizes):
    """Radial Attention (Li et al., 2025, arXiv:2506.19852, §4), equal for all heads; see `radial_bits`.

    Attributes:
        width: Fraction of its own frame and adjacent frames that a query attends to.
        decay: Factor of this fraction per doubling of the distance in frames.
        sink_frames: Number of first frames that every query attends to.
    """

    width: float = 1.0
    decay: float = 0.5
    sink_frames: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        width_fits = 0 < self.width < math.inf
        require_value(self, "width", width_fits, "must be a positive share of a frame; 1 is the paper's")
        require_value(self, "decay", 0 < self.decay <= 1, "must lie above 0 and not above 1; 0.5 is the paper's")
        require_value(self, "sink_frames", self.sink_frames >= 0, "must not be negative")

    def mask(self, request: MaskRequest) -> BlockMask:
        grid = self.grid(request)
        bits = radial_bits(grid, request.thw, self.width, self.decay, self.sink_frames)
        return BlockMask(torch.from_numpy(np.tile(bits, (request.heads, 1, 1))), grid)


def radial_bits(
    grid: BlockGrid, thw: tuple[int, int, int], width: float, decay: float, sink_frames: int
) -> np.ndarray:
    """Returns bool[nq, nk]: blocks with a pair of tokens within the pattern, and all text.

    With s tokens per frame, d = |i − j| and b = width · s · decay^⌊log₂ max(d, 1)⌋, a query at position x of frame i
    may attend to a key at position y of frame j if
        |x − y| + 1 ≤ b                                if b ≥ B = max(block_q, block_k)
        |x − y| + 1 ≤ B, and d is a multiple of ⌈B/b⌉  if b < B: a block's width of some frames, not less of each
        j < sink_frames                                for any distance
    With width 1, decay ½ and B = 1 this is the paper's mask; B is a block because a thinner band costs the same.
    """
    frames, frame = thw[0], thw[1] * thw[2]
    line, at = np.divmod(np.arange(frames * frame), frame)
    q, k = line_segments(grid.q_axis, line, at), line_segments(grid.k_axis, line, at)
    # By distance in frames: largest distance of positions plus one, 0 for none: int64[frames]
    bandwidth, thinnest, reach = width * frame, max(grid.block_q, grid.block_k), []
    for distance in range(frames):
        if distance > 1 and distance & (distance - 1) == 0:
            bandwidth *= decay  # repeated products, since powers round differently across machines
        if bandwidth >= thinnest:
            reach.append(math.floor(min(bandwidth, 1 << 40)))
        else:
            reach.append(thinnest if distance % math.ceil(thinnest / bandwidth) == 0 else 0)
    dense = distances(q, k) < np.array(reach)[np.abs(q.line[:, None] - k.line)]
    dense |= k.line < sink_frames
    return reduce_to_blocks(grid, dense, q, k)


@dataclass(frozen=True)
class SvgSource(BlockSizes):
    """Sparse VideoGen (Xi et al., 2025, arXiv:2502.01776, §4) with spatial heads (near frames) and temporal heads.

    Temporal heads attend to near positions, in token order "hwt" as in the paper: tokens of a position share a block.

    Attributes:
        frames: Number of frames around its own that a query of a spatial head attends to.
        bandwidth: Fraction of every frame, around its position, that a query of a temporal head attends to.
        sink_frames: Number of first frames that every query of a spatial head attends to.
        temporal_heads: Temporal heads of every layer: a fraction, spread evenly, or head numbers. The paper classifies
            heads at every call by a sample of queries, which this source does not do.
    """

    frames: int = 7
    bandwidth: float = 0.3
    sink_frames: int = 1
    temporal_heads: float | tuple[int, ...] = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        require_value(self, "frames", self.frames >= 1, "must be at least 1, the query's own")
        in_range = 0 < self.bandwidth <= 1
        require_value(self, "bandwidth", in_range, "must lie above 0 and not above 1: a share of a frame's positions")
        require_value(self, "sink_frames", self.sink_frames >= 0, "must not be negative")
        if isinstance(self.temporal_heads, tuple):
            fits, message = min(self.temporal_heads, default=0) >= 0, "must be head numbers, from 0"
        else:
            fits = 0 <= self.temporal_heads <= 1
            message = "must be a share between 0 and 1, or a list of head numbers"
        require_value(self, "temporal_heads", fits, message)

    def temporal(self, heads: int) -> np.ndarray:
        """Returns bool[heads], True for temporal heads. Raises UserError for head numbers out of range."""
        numbers = np.arange(heads)
        if isinstance(self.temporal_heads, tuple):
            if max(self.temporal_heads, default=0) >= heads:
                raise UserError(
                    f"temporal_heads={list(self.temporal_heads)} has a head that the model lacks; its {heads} heads "
                    f"are 0 to {heads - 1}"
                )
            return np.isin(numbers, self.temporal_heads)
        wanted = round(self.temporal_heads * heads)
        return (numbers + 1) * wanted // heads > numbers * wanted // heads

    def grid(self, request: MaskRequest) -> BlockGrid:
        temporal = self.temporal(request.heads)
        return replace(
            super().grid(request), orders=tuple("hwt" if is_temporal else "thw" for is_temporal in temporal)
        )

    def mask(self, request: MaskRequest) -> BlockMask:
        grid, temporal = self.grid(request), self.temporal(request.heads)
        frames, positions = request.thw[0], request.thw[1] * request.thw[2]
        # 1. Spatial heads, in order "thw": all positions of near frames
        near_frames = near_bits(grid, np.repeat(np.arange(frames), positions), self.frames // 2, self.sink_frames)
        # 2. Temporal heads, in order "hwt": near positions of all frames. Without sink frames, since every block has
        # tokens of the first frame and would be dense
        reach = int(self.bandwidth * positions) // 2
        near_positions = near_bits(grid, np.repeat(np.arange(positions), frames), reach)
        bits = np.stack([near_frames, near_positions])[temporal.astype(np.int64)]
        return BlockMask(torch.from_numpy(bits), grid)


def near_bits(grid: BlockGrid, at: np.ndarray, reach: int, sinks: int = 0) -> np.ndarray:
    """Returns bool[nq, nk]: blocks with a pair within reach, and all text.

    A query at i may attend to tokens at j if |i − j| ≤ reach or j < sinks. `at` int64[video tokens], ascending in
    block order, has frames for order "thw" and positions in a frame for "hwt".
    """
    line = np.zeros_like(at)
    q, k = line_segments(grid.q_axis, line, at), line_segments(grid.k_axis, line, at)
    return reduce_to_blocks(grid, (distances(q, k) <= reach) | (k.first < sinks), q, k)
