"""Sparse VideoGen: some heads attend to frames nearby, the others to the same place in all frames."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from dbsp_core.masks.block_mask import BlockMask
from dbsp_core.masks.grid import BlockGrid
from dbsp_core.sources.base import BlockSizes, MaskRequest
from dbsp_core.sources.geometry import distances, line_segments, reduce_to_blocks
from dbsp_core.utils.errors import UserError, bad_value, require_value

__all__ = ["SvgSource", "spatial_bits", "temporal_bits"]

TIME_FASTEST = "hwt"


@dataclass(frozen=True)
class SvgSource(BlockSizes):
    """Sparse VideoGen (Xi et al., 2025, arXiv:2502.01776, §4); see `spatial_bits` and `temporal_bits`.

    Temporal heads have token order "hwt", as in the paper: a place's tokens of all frames share a block.

    Attributes:
        frames: Number of frames, centred on its own, that a query of a spatial head attends to.
        bandwidth: Share of every frame, centred on its place, that a query of a temporal head attends to.
        sink_frames: Number of first frames that every query of a spatial head attends to.
        temporal_heads: The temporal heads of every layer: a share, spread evenly, or their numbers. The paper decides
            it at every call from a sample of the head's queries, which this source does not have.
    """

    frames: int = 7
    bandwidth: float = 0.3
    sink_frames: int = 1
    temporal_heads: float | tuple[int, ...] = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        require_value(self, "frames", self.frames >= 1, "must be at least 1, the query's own")
        in_range = 0 < self.bandwidth <= 1
        require_value(self, "bandwidth", in_range, "must lie above 0 and not above 1: a share of a frame's places")
        require_value(self, "sink_frames", self.sink_frames >= 0, "must not be negative")
        if isinstance(self.temporal_heads, tuple):
            no_negative = min(self.temporal_heads, default=0) >= 0
            require_value(self, "temporal_heads", no_negative, "must be head numbers, from 0")
        elif not 0 <= self.temporal_heads <= 1:
            raise bad_value(self, "temporal_heads", "must be a share between 0 and 1, or a list of head numbers")

    def temporal(self, heads: int) -> np.ndarray:
        """bool[heads]: True for temporal heads. Raises UserError for a head that the model lacks."""
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
        return replace(super().grid(request), orders=tuple(TIME_FASTEST if t else "thw" for t in temporal))

    def mask(self, request: MaskRequest) -> BlockMask:
        grid, temporal = self.grid(request), self.temporal(request.heads)
        spatial = spatial_bits(grid, request.thw, self.frames, self.sink_frames)
        kinds = np.stack([spatial, temporal_bits(grid, request.thw, self.bandwidth)])
        return BlockMask(torch.from_numpy(kinds[temporal.astype(np.int64)]), grid)


def spatial_bits(grid: BlockGrid, thw: tuple[int, int, int], frames: int, sink_frames: int) -> np.ndarray:
    """bool[nq, nk] of tokens in order "thw": blocks with a pair of tokens that may attend to each other, and text.

    A query in frame i may attend to all of frame j if |i − j| ≤ ⌊frames / 2⌋ or j < sink_frames.
    """
    frame = np.repeat(np.arange(thw[0]), thw[1] * thw[2])
    everything = np.zeros_like(frame)
    q, k = line_segments(grid.q_axis, everything, frame), line_segments(grid.k_axis, everything, frame)
    return reduce_to_blocks(grid, (distances(q, k) <= frames // 2) | (k.first < sink_frames), q, k)


def temporal_bits(grid: BlockGrid, thw: tuple[int, int, int], bandwidth: float) -> np.ndarray:
    """bool[nq, nk] of tokens in order "hwt": blocks with a pair of tokens that may attend to each other, and text.

    A query at place x of any frame may attend to place y of every frame if |x − y| ≤ ⌊bandwidth · s / 2⌋, of s places
    in a frame. The first frame is no sink here: every block has tokens of it, so that all blocks would be dense.
    """
    places = thw[1] * thw[2]
    place = np.repeat(np.arange(places), thw[0])
    everything = np.zeros_like(place)
    q, k = line_segments(grid.q_axis, everything, place), line_segments(grid.k_axis, everything, place)
    return reduce_to_blocks(grid, distances(q, k) <= int(bandwidth * places) // 2, q, k)
