"""Masks of a window of tiles plus tiles of largest score minus redundancy (SSTA of HunyuanVideo-1.5)."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, NamedTuple

import numpy as np
import torch

from dbsp_core.masks.block_mask import BlockMask
from dbsp_core.masks.grid import BlockGrid, tile_lengths
from dbsp_core.sources.base import LocalQK, MaskRequest, PredictedSource, kept_blocks
from dbsp_core.sources.head_shares import pool_own_heads, predict_bits
from dbsp_core.sources.sol import ANY_SIMILARITY
from dbsp_core.sources.sparge import always_dense
from dbsp_core.sources.window import Sizes, tile_bits
from dbsp_core.utils.errors import require_value
from dbsp_core.utils.schema import require_choice
from dbsp_kernels.prediction import halving_sum, pooled_scores, select_blocks
from dbsp_kernels.segments import to_device

IMAGE_TILE = (1, 16, 24)
HALVED_UP_TO = 31
"""Largest number of token-grid frames for which rows keep half as many tiles."""


@dataclass(frozen=True)
class SstaSource(PredictedSource):
    """SSTA: a row keeps a window of tiles around its own, and the most similar tiles that are not redundant.

    For HunyuanVideo-1.5's sparse checkpoint, which was trained with it. Rows keep unequal numbers of tiles. Predicted
    like `SpargeSource`. (Tencent, HunyuanVideo 1.5 Technical Report, 2025, and its code.)

    Attributes:
        topk: Tiles of the video that a row keeps by score, half as many with 2 to 31 frames of the token grid. The
            score of tiles i and j is weight · s(qᵢ, kⱼ) − (1 − weight) · (mean of s(kₗ, kⱼ) over l ≠ j), with s = (1 +
            cosine) / 2 of the means of the tiles' tokens.
        weight: See topk; λ in the report.
        tile: Frames, rows and columns of a tile, which blocks divide; 1 × 16 × 24 for an image.
        window: Frames, rows and columns of the window, in tiles; shifted inside at borders. None for an image.
        padding: "absent": rows also attend to the zeros that pad border tiles, as in the checkpoint, as absent keys.
            "none": to real tokens only.
    """

    block_q: int = 128
    block_k: int = 128
    topk: int = 64
    weight: float = 0.7
    tile: Sizes = (6, 8, 8)
    window: Sizes = (3, 3, 3)
    padding: Literal["absent", "none"] = "absent"
    approximates_dense: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        require_value(self, "topk", self.topk >= 1, "must be at least 1; 64 is the checkpoint's")
        require_value(self, "weight", 0 <= self.weight <= 1, "must lie between 0 and 1; 0.7 is the checkpoint's")
        require_choice("padding", self.padding, ("absent", "none"), "mask.")
        for name in ("tile", "window"):
            sizes = getattr(self, name)
            require_value(self, name, len(sizes) == 3 and min(sizes) >= 1, "needs three sizes of at least 1")
        for name in ("block_q", "block_k"):
            divides = math.prod(self.tile) % getattr(self, name) == 0
            require_value(self, name, divides, f"must divide a tile's {math.prod(self.tile)} tokens")

    @property
    def absent_keys(self) -> bool:
        """True if masks have absent keys, which need a kernel that returns its log-sum-exp."""
        return self.padding == "absent"

    def grid(self, request: MaskRequest) -> BlockGrid:
        return self._tile_grid(request, self.tile if request.thw[0] > 1 else IMAGE_TILE)

    def mask(self, request: MaskRequest, tokens: LocalQK) -> BlockMask:
        """Predicts the mask. Collective."""
        grid, device = self.grid(request), tokens.q.device
        tile, window = (self.tile, self.window) if request.thw[0] > 1 else (IMAGE_TILE, None)
        tiles = Tiles.of(grid, tile, window, device)
        dense = always_dense(tiles.grid, self.dense_text, False, device)
        nq, text = tiles.grid.nq, tiles.text if self.dense_text in (True, "columns") else 0
        topk = self.topk // 2 if 1 < request.thw[0] <= HALVED_UP_TO else self.topk
        count = text + kept_blocks(topk, tiles.grid.nk - text)

        def choose(some: torch.Tensor) -> torch.Tensor:
            # 1. Directions of mean queries and keys, [heads, tq + tk, D]
            means = some[..., :-1].double()
            unit = means / halving_sum(means * means).sqrt().clamp(min=1e-12)[..., None]
            keys = unit[:, nq + text :]
            # 2. Redundancy of each key: Σ kₗ·kⱼ over l ≠ j, from the sum of all keys, [heads, D] → [heads, tk]
            like = halving_sum(keys * halving_sum(keys.mT)[:, None]) - halving_sum(keys * keys)
            redundancy = (like / max(1, keys.shape[1] - 1) + 1) / 2
            # 3. Scores from 0 to 1, higher for text, [heads, tq, tk]
            rows = torch.cat([unit.float(), some[..., -1:]], dim=-1)
            scores = pooled_scores(rows, nq, 1.0, ANY_SIMILARITY).add_(1).mul_(self.weight / 2)
            scores[..., text:] += (1 - self.weight) * (1 - redundancy[:, None])
            scores[..., :text] = 1.5
            return select_blocks(scores.clamp_(min=0), dense.expand(len(some), -1), None, count)

        # 4. Expand tiles to blocks
        bits = predict_bits(pool_own_heads(tokens, tiles.grid), choose, tokens, tiles.grid) | tiles.near
        absent = None
        if self.absent_keys and tiles.is_padded:
            absent = (bits * tiles.padding).sum(-1).log_().index_select(1, tiles.of_q)  # exact: integers
        bits = bits.index_select(1, tiles.of_q).index_select(2, tiles.of_k)
        return BlockMask(bits, grid, absent=absent)


class Tiles(NamedTuple):
    """The tiles of a grid's blocks as a grid; text is cut into runs of as many tokens."""

    grid: BlockGrid
    text: int  # number of text tiles, which come first
    is_padded: bool
    near: torch.Tensor  # bool[tq, tk], the window
    padding: torch.Tensor  # float32[tk], padding tokens of each video tile
    of_q: torch.Tensor  # int64[nq], tile of each query block
    of_k: torch.Tensor  # int64[nk]

    @classmethod
    @functools.lru_cache(maxsize=8)  # equal in every attention of a video size
    def of(cls, grid: BlockGrid, tile: Sizes, window: Sizes | None, device: torch.device) -> Tiles:
        """Returns the tiles of a grid; `window` is in tiles, or None."""
        if grid.thw is None:
            raise ValueError("tiles need the size of the video's token grid")
        size = math.prod(tile)
        tiles = replace(grid, block_q=size, block_k=size)
        text = int((tiles.k_axis.starts < grid.text_tokens).sum())
        near, padding = np.zeros((tiles.nq, tiles.nk), dtype=bool), np.zeros(tiles.nk, dtype=np.float32)
        if window is not None:
            near[text:, text:] = tile_bits(tiles, grid.thw, window, tile)[text:, text:]
        padding[text:] = size - tile_lengths(str(grid.orders[0]), grid.thw)
        of_q, of_k = (tiles.q_axis.block_of[axis.starts] for axis in (grid.q_axis, grid.k_axis))
        tables = (to_device(table, device) for table in (near, padding, of_q, of_k))
        return cls(tiles, text, bool(padding.any()), *tables)
