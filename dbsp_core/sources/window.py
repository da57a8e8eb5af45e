"""A sliding (t, h, w) window: each query attends to the keys around it, and to all text."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from dbsp_core.grid import BlockAxis, BlockGrid
from dbsp_core.mask import BlockMask
from dbsp_core.sources.base import HomeTokens, MaskRequest
from dbsp_core.sources.blocks import BlockSizes

__all__ = ["WindowSource"]


@dataclass(frozen=True)
class WindowSource(BlockSizes):
    """window: how many frames, rows and columns around itself a query attends to, each counted both ways together.

    A block is dense when it holds any pair of tokens within the window: the boxes that the blocks' tokens span in
    (t, h, w) are compared, so a block that wraps around a row or a frame counts as its bounding box. Rows and columns
    of text are dense. The same for every head.
    """

    window: tuple[int, int, int] = (5, 9, 9)

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.window) != 3 or min(self.window) < 1:
            raise ValueError(f"window={self.window} needs three sizes of at least 1: frames, rows, columns")

    def mask(self, request: MaskRequest, tokens: HomeTokens | None = None) -> BlockMask:
        return _mask(self.window, request.heads, request.thw, self.grid(request))


def _mask(window: tuple[int, int, int], heads: int, thw: tuple[int, int, int], grid: BlockGrid) -> BlockMask:
    q_low, q_high = _boxes(grid.q_axis, thw, grid.text_tokens)
    k_low, k_high = _boxes(grid.k_axis, thw, grid.text_tokens)
    reach = np.array(window) // 2
    near = (q_low[:, None] <= k_high[None] + reach) & (k_low[None] <= q_high[:, None] + reach)
    dense = near.all(axis=2)
    dense[grid.q_axis.starts < grid.text_tokens] = True
    dense[:, grid.k_axis.starts < grid.text_tokens] = True
    return BlockMask(torch.from_numpy(np.tile(dense, (heads, 1, 1))), grid)


def _boxes(axis: BlockAxis, thw: tuple[int, int, int], text_tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Least and greatest (t, h, w) of each block's tokens, int64[n, 3] each. Text counts as the first video token."""
    video = np.maximum(np.arange(axis.lengths.sum()) - text_tokens, 0)
    place = np.stack(np.unravel_index(video, thw), axis=1)
    return np.minimum.reduceat(place, axis.starts), np.maximum.reduceat(place, axis.starts)
