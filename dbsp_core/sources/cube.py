"""Masks of tiles by pooled scores, with a kept fraction per step (SGLang's cube attention)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from dbsp_core.masks.block_mask import BlockMask
from dbsp_core.sources.base import ByStep, LocalQK, MaskRequest, kept_blocks
from dbsp_core.sources.head_shares import pool_own_heads, predict_bits
from dbsp_core.sources.sol import ANY_SIMILARITY
from dbsp_core.sources.vsa import TileSource
from dbsp_kernels.prediction import pooled_scores, select_blocks
from dbsp_kernels.tables import pack_bits


@dataclass(frozen=True)
class CubeSource(TileSource):
    """Cube attention: blocks are tiles of the video, and a row keeps its own tile and those of largest pooled score.

    Rows differ by at most one block. Predicted like `SpargeSource`. (SGLang's backend `cube_sparse_attn` for
    MiniMax-H3, 2026.)

    Attributes:
        topk: Fraction of tiles that a row keeps by score, ⌊n · topk⌋ in float32 and at least one; 1.0: dense. A list
            has one fraction per denoising step. The row's own tile and dense text are kept in addition.
    """

    topk: ByStep = 0.2
    scheduled: ClassVar[tuple[str, ...]] = ("topk",)
    approximates_dense: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require_each("topk", lambda share: 0 < share <= 1, "must be above 0 and at most 1; 0.2 is usual")

    def mask(self, request: MaskRequest, tokens: LocalQK) -> BlockMask:
        """Predicts the mask. Collective."""
        grid, device = self.grid(request), tokens.q.device
        dense, text = self.text_blocks(grid, device)
        share = np.float32(self._at_step("topk", request.step))
        count = text + kept_blocks(float(np.float32(grid.nk - text) * share), grid.nk - text)
        diagonal = pack_bits(torch.eye(grid.nk, dtype=torch.bool, device=device))

        def choose(some: torch.Tensor) -> torch.Tensor:
            chance = torch.softmax(pooled_scores(some, grid.nq, tokens.scale, ANY_SIMILARITY), dim=-1)
            chance[..., :text] = 1.0  # keep text first; other blocks compete for the rest
            return select_blocks(chance, dense.expand(len(some), -1), None, count) | diagonal

        return BlockMask(predict_bits(pool_own_heads(tokens, grid), choose, tokens, grid), grid)
