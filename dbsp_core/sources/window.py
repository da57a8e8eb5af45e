"""Sliding (t, h, w) windows: each query attends to the keys around it, and to all text."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from dbsp_core.masks.block_mask import BlockMask
from dbsp_core.masks.grid import BlockAxis, BlockGrid, video_order
from dbsp_core.sources.base import BlockSizes, MaskRequest
from dbsp_core.sources.frame_patterns import line_segments, reduce_to_blocks
from dbsp_core.utils.errors import require_value

Sizes = tuple[int, int, int]


@dataclass(frozen=True)
class WindowSource(BlockSizes):
    """A window, equal for all heads. Sizes are frames, rows and columns.

    Attributes:
        window: Size of the window around a query: in tokens, default [5, 9, 9] (see `window_bits`), or with `tile` in
            tiles, default [3, 3, 3] (see `tile_bits`).
        tile: Size of a tile. Tokens are then in tile order, and queries attend to whole tiles, as in Sliding Tile
            Attention (Zhang et al., 2025, arXiv:2502.04507). Best if tiles divide the video and equal blocks.
        shifted: True to shift windows of tiles inside at borders instead of cutting them off (see `tile_bits`).
        whole_tiles: True if blocks do not mix tiles even if tiles do not divide the video, as in `vsa`, `cube` and
            `ssta`; required to join the window with these.
    """

    window: Sizes | None = None
    tile: Sizes | None = None
    shifted: bool = True
    whole_tiles: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, sizes in (("window", self.window), ("tile", self.tile)):
            fits = sizes is None or (len(sizes) == 3 and min(sizes) >= 1)
            require_value(self, name, fits, "needs three sizes of at least 1: frames, rows, columns")

    def grid(self, request: MaskRequest) -> BlockGrid:
        if self.tile is None:
            return super().grid(request)
        return self._tile_grid(request, self.tile, self.whole_tiles)

    def mask(self, request: MaskRequest) -> BlockMask:
        grid = self.grid(request)
        if self.tile is None:
            bits = window_bits(grid, request.thw, self.window or (5, 9, 9))
        else:
            bits = tile_bits(grid, request.thw, self.window or (3, 3, 3), self.tile, self.shifted)
        return BlockMask(torch.from_numpy(np.tile(bits, (request.heads, 1, 1))), grid)


def window_bits(grid: BlockGrid, thw: Sizes, window: Sizes) -> np.ndarray:
    """Returns bool[nq, nk] in order "thw": blocks with a pair within the window, and text.

    A query may attend to a key if they are at most ⌊window / 2⌋ frames, rows and columns apart. Compares bounding
    boxes of blocks in (t, h, w); a block that wraps around a row or frame counts as its whole box.
    """
    q_low, q_high = _boxes(grid.q_axis, thw, grid.text_tokens)
    k_low, k_high = _boxes(grid.k_axis, thw, grid.text_tokens)
    reach = np.array(window) // 2
    near = (q_low[:, None] <= k_high[None] + reach) & (k_low[None] <= q_high[:, None] + reach)
    dense = near.all(axis=2)
    grid.make_text_dense(dense)
    return dense


def tile_bits(grid: BlockGrid, thw: Sizes, window: Sizes, tile: Sizes, shifted: bool = True) -> np.ndarray:
    """Returns bool[nq, nk] in order "tile:TxHxW": blocks with a pair within the window of tiles, and text.

    Along each axis, a query in tile a of n may attend to `window` tiles from clip(a − ⌊window / 2⌋, 0, n − window) on;
    at borders the window is shifted inside, so that all queries attend to equally many tiles. Without `shifted`, it
    may attend to tiles at most ⌊window / 2⌋ away.
    """
    tiles = [-(-size // each) for size, each in zip(thw, tile, strict=True)]
    at = np.stack(np.unravel_index(video_order("tile:{}x{}x{}".format(*tile), thw), thw)) // np.array(tile)[:, None]
    line = at[0] * tiles[1] + at[1]
    q, k = line_segments(grid.q_axis, line, at[2]), line_segments(grid.k_axis, line, at[2])
    dense = np.ones((len(q.line), len(k.line)), dtype=bool)
    for axis, (of_q, of_k) in enumerate(zip(np.divmod(q.line, tiles[1]), np.divmod(k.line, tiles[1]), strict=True)):
        first, last = _window_of(of_q, tiles[axis], window[axis], shifted)
        dense &= (first[:, None] <= of_k) & (of_k <= last[:, None])
    first, last = _window_of(np.arange(tiles[2]), tiles[2], window[2], shifted)
    # A segment's tiles are contiguous, so their windows span from the first tile's to the last tile's.
    dense &= (first[q.first][:, None] <= k.last) & (k.first <= last[q.last][:, None])
    return reduce_to_blocks(grid, dense, q, k)


def _window_of(tile: np.ndarray, tiles: int, window: int, shifted: bool) -> tuple[np.ndarray, np.ndarray]:
    """Returns first and last tile of each tile's window along an axis, possibly beyond its ends."""
    if not shifted:
        return tile - window // 2, tile + window // 2
    first = np.clip(tile - window // 2, 0, max(tiles - window, 0))
    return first, first + window - 1


def _boxes(axis: BlockAxis, thw: Sizes, text_tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns least and greatest (t, h, w) of each block's tokens, int64[n, 3]; text has the first token's."""
    video = np.maximum(np.arange(axis.lengths.sum()) - text_tokens, 0)
    position = np.stack(np.unravel_index(video, thw), axis=1)
    return np.minimum.reduceat(position, axis.starts), np.maximum.reduceat(position, axis.starts)
