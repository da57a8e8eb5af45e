"""Masks of tiles with equal numbers of blocks per row, plus a coarse branch (VSA)."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from dbsp_core.masks.block_mask import BlockMask
from dbsp_core.masks.branches import CoarseBranch
from dbsp_core.masks.grid import BlockGrid
from dbsp_core.sources.base import ByStep, LocalQK, MaskRequest, PredictedSource, kept_blocks
from dbsp_core.sources.head_shares import LocalBlocks, pool_own_heads, predict_bits, send_to_sources
from dbsp_core.sources.sol import ANY_SIMILARITY
from dbsp_core.sources.sparge import always_dense
from dbsp_core.utils.errors import SettingError, require_value
from dbsp_core.utils.process import log
from dbsp_kernels.prediction import pooled_scores, select_blocks


@dataclass(frozen=True)
class TileSource(PredictedSource):
    """Base of predicted masks whose blocks are tiles of the video.

    Attributes:
        tile: Frames, rows and columns of a tile, which is a block. Border tiles may be smaller.
    """

    tile: tuple[int, int, int] = field(default=(4, 4, 4), kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        require_value(self, "tile", len(self.tile) == 3 and min(self.tile) >= 1, "must be at least 1 × 1 × 1")
        tokens = math.prod(self.tile)
        if (self.block_q, self.block_k) != (tokens, tokens):
            message = f"a tile of {tokens} tokens is a block of this mask source; set block_q and block_k to {tokens}"
            raise SettingError(message, ("block_q",))

    def grid(self, request: MaskRequest) -> BlockGrid:
        return self._tile_grid(request, self.tile, text_runs=request.text_runs)

    def text_blocks(self, grid: BlockGrid, device: torch.device) -> tuple[torch.Tensor, int]:
        """Returns `always_dense`, and the number of leading key blocks (text) that are active in every row."""
        text = int((grid.k_axis.starts < grid.text_tokens).sum()) if self.dense_text in (True, "columns") else 0
        return always_dense(grid, self.dense_text, False, device), text


@dataclass(frozen=True)
class VsaSource(TileSource):
    """Video Sparse Attention: blocks are tiles of the video, and every row keeps those of largest pooled score.

    For models trained with it, such as FastWan. They add a coarse branch, attention over pooled tokens times a gate
    projected from the hidden states; it is added if the model has the projection. Predicted like `SpargeSource`.
    (Zhang et al., VSA: Faster Video Diffusion with Trainable Sparse Attention, arXiv 2505.13389, 2025.)

    Attributes:
        sparsity: Fraction of key blocks that a row skips; it keeps ceil((1 − sparsity) · nk), at least one. Blocks of
            dense text are kept in addition.
        coarse: True to add the coarse branch, if the model has a gate for it.
    """

    sparsity: ByStep = 0.8
    coarse: bool = True
    gate: ClassVar[str] = "to_gate_compress"
    scheduled: ClassVar[tuple[str, ...]] = ("sparsity",)

    @property
    def branch_layer(self) -> str | None:
        """Name of the gate's layer in a self-attention module."""
        return self.gate if self.coarse else None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require_each("sparsity", lambda share: 0 <= share < 1, "must be at least 0 and below 1; 0.8 is usual")

    def mask(self, request: MaskRequest, tokens: LocalQK) -> BlockMask:
        """Predicts the mask, with the coarse branch if there is a gate. Collective."""
        grid, values = self.grid(request), None
        if self.coarse and tokens.gate is not None:
            values = tokens.v
        elif self.coarse and tokens.group.rank == 0:
            _say_without_gate()
        rows = pool_own_heads(tokens, grid, values)
        dense, text = self.text_blocks(grid, rows.device)
        of_video = grid.nk - text
        count = text + kept_blocks((1 - self._at_step("sparsity", request.step)) * of_video, of_video, round_up=True)
        known, coarse = grid.nq + grid.nk, []

        def choose(some: torch.Tensor) -> torch.Tensor:
            chance = torch.softmax(pooled_scores(some[:, :known], grid.nq, tokens.scale, ANY_SIMILARITY), dim=-1)
            if values is not None:
                coarse.append(torch.bmm(chance, some[:, known:, :-1].double()).float())
            chance[..., :text] = 1.0  # keep text first; other blocks compete for the rest
            return select_blocks(chance, dense.expand(len(some), -1), None, count)

        bits = predict_bits(rows, choose, tokens, grid)
        if values is None or tokens.gate is None:
            return BlockMask(bits, grid)
        blocks = LocalBlocks.from_layout(tokens.layout, grid, tokens.group.rank, tokens.q.shape[2], rows.device)
        mine = torch.cat(coarse).unflatten(0, (-1, len(tokens.q)))  # [Hs, B, nq, D]
        local = send_to_sources(mine, request.heads, blocks, tokens.group)
        return BlockMask(bits, grid, CoarseBranch(local, blocks.block, blocks.real, tokens.gate))


@functools.cache
def _say_without_gate() -> None:
    log.warning(
        "mask source vsa: no gate (attn1.to_gate_compress) found, so the coarse branch is off; models trained "
        "with VSA need it"
    )
