"""Radial attention: the part of a frame that a query attends to shrinks with the distance in time."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from dbsp_core.masks.block_mask import BlockMask
from dbsp_core.masks.grid import BlockGrid
from dbsp_core.sources.base import BlockSizes, MaskRequest
from dbsp_core.sources.geometry import distances, line_segments, reduce_to_blocks
from dbsp_core.utils.errors import require_value

__all__ = ["RadialSource", "radial_bits"]


@dataclass(frozen=True)
class RadialSource(BlockSizes):
    """Radial Attention (Li et al., 2025, arXiv:2506.19852, §4), the same for every head; see `radial_bits`.

    Attributes:
        width: Share of its own frame and of the next that a query attends to.
        decay: Factor of this share each time that the distance in frames doubles.
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
    """bool[nq, nk]: blocks with a pair of tokens that may attend to each other, and all text.

    A frame has s tokens; a query at place x of frame i may attend to a key at place y of frame j if, with d = |i − j|
    and b = width · s · decay^⌊log₂ max(d, 1)⌋,
        |x − y| + 1 ≤ b                                if b ≥ B = max(block_q, block_k)
        |x − y| + 1 ≤ B, and d is a multiple of ⌈B/b⌉  if b < B: a block's width of some frames, not less of each
        j < sink_frames                                whatever the distance
    With width 1, decay ½ and B = 1 this is the paper's mask; B is a block because a thinner band costs as much.
    """
    frames, frame = thw[0], thw[1] * thw[2]
    line, at = np.divmod(np.arange(frames * frame), frame)
    q, k = line_segments(grid.q_axis, line, at), line_segments(grid.k_axis, line, at)
    reach = _reach(frames, width * frame, decay, max(grid.block_q, grid.block_k))
    dense = distances(q, k) < reach[np.abs(q.line[:, None] - k.line)]
    dense |= k.line < sink_frames
    return reduce_to_blocks(grid, dense, q, k)


def _reach(frames: int, bandwidth: float, decay: float, thinnest: int) -> np.ndarray:
    """int64[frames]: by distance in frames, one more than how far apart places may be; 0 for no pair."""
    reach = []
    for distance in range(frames):
        if distance > 1 and distance & (distance - 1) == 0:
            bandwidth *= decay  # step by step: powers are not rounded alike everywhere
        if bandwidth >= thinnest:
            reach.append(math.floor(min(bandwidth, 1 << 40)))
        else:
            reach.append(thinnest if distance % math.ceil(thinnest / bandwidth) == 0 else 0)
    return np.array(reach)
