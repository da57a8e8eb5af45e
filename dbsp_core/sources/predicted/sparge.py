"""Masks predicted from each attention's own queries and keys, before they travel (SpargeAttn)."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import numpy as np
import torch

from dbsp_core.masks.block_mask import BlockMask
from dbsp_core.masks.grid import BlockGrid
from dbsp_core.masks.token_order import CANONICAL, require_order
from dbsp_core.sources.base import BlockSizes, Changes, LocalQK, MaskRequest
from dbsp_core.sources.predicted.distributed_pooling import gather_bits, pool_own_heads
from dbsp_core.sources.predicted.parts import select_in_parts
from dbsp_core.utils.errors import SettingError, blame_setting, require_value
from dbsp_kernels.packing.h2d import to_device
from dbsp_kernels.prediction.block_selection import pooled_scores

__all__ = ["SpargeSource", "SpargeThresholds", "always_dense"]


@dataclass(frozen=True)
class SpargeThresholds:
    """How blocks are chosen in each row of pooled attention probabilities, largest first. Exactly one of cdf and topk.

    cdf:        as many as have a cumulative probability of at most this, but at least one
    topk:       this share of the row's blocks, rounded down, but at least one
    similarity: rows and columns of blocks whose tokens' mean cosine is at or below this are dense: a mean says
                little about them
    Raises ValueError for both or neither of cdf and topk, or values out of range.
    """

    cdf: float | None = None
    topk: float | None = None
    similarity: float = 0.3

    def __post_init__(self) -> None:
        if (self.cdf is None) == (self.topk is None):
            message = "mask source 'sparge' needs either cdf or topk, and not both; cdf: 0.92 is what xDiT uses"
            raise SettingError(message, ("cdf",))
        for name, value in (("cdf", self.cdf), ("topk", self.topk)):
            require_value(self, name, value is None or 0 < value <= 1, "must be above 0 and at most 1")
        is_cosine = -1 <= self.similarity <= 1
        require_value(self, "similarity", is_cosine, "is a cosine: it must lie between -1 and 1")

    def limits(self, blocks: int) -> tuple[float | None, int]:
        """For `select_blocks`: the largest cumulative probability, or None and how many blocks of a row."""
        if self.topk is not None:
            return None, max(1, math.floor(self.topk * blocks + 1e-9))
        return (None if self.cdf == 1 else self.cdf), blocks


LARGEST_BLOCK = 1 << 16
USUAL_CDF = 0.92
"""xDiT's."""


@dataclass(frozen=True)
class SpargeSource(BlockSizes):
    """SpargeAttn's block predictor: each head's pooled attention says where most of its probability will be.

    cdf, topk, similarity: see `SpargeThresholds`; where neither cdf nor topk is given, cdf is 0.92, as in xDiT
    attention_sink: whether the first key block is dense in every row
    dense_text:     whether rows and columns of text are dense
    token_order:    the token order that is cut into blocks; see `dbsp_core.masks.token_order`

    Blocks are pooled from each rank's own tokens, each head is predicted by one rank, and the bits are gathered, so
    that the plan is known before any q, k or v travels, for every strategy. The bits are those that a single process
    would predict, for any ranks and layout. Every sample of a batch has masks of its own, as B·H heads.
    Zhang et al., SpargeAttn: Accurate and Training-Free Sparse Attention Accelerating Any Model Inference, 2025. As in
    its published implementation, self-similarity is the mean cosine of a block's tokens.
    """

    cdf: float | None = None
    topk: float | None = None
    similarity: float = 0.3
    attention_sink: bool = False
    dense_text: bool = True
    token_order: str = CANONICAL

    def __post_init__(self) -> None:
        super().__post_init__()
        with blame_setting("token_order"):
            require_order(self.token_order)
        if self.cdf is None and self.topk is None:
            object.__setattr__(self, "cdf", USUAL_CDF)
        self.thresholds  # noqa: B018  raises for values out of range
        for name in ("block_q", "block_k"):
            if getattr(self, name) > LARGEST_BLOCK:
                message = f"mask source 'sparge' takes blocks of at most {LARGEST_BLOCK} tokens; 64 is usual"
                raise SettingError(message, (name,))

    @property
    def thresholds(self) -> SpargeThresholds:
        return SpargeThresholds(self.cdf, self.topk, self.similarity)

    @property
    def changes(self) -> Changes:
        return "per_call"

    def grid(self, request: MaskRequest) -> BlockGrid:
        sizes = request.tokens, request.text_tokens, self.block_q, self.block_k
        return BlockGrid(*sizes, request.thw, (self.token_order,))

    def mask(self, request: MaskRequest, tokens: LocalQK) -> BlockMask:
        """Collective."""
        grid, how = self.grid(request), self.thresholds
        rows = pool_own_heads(tokens, grid)
        samples, rows = rows.shape[1], rows.flatten(0, 1)

        def scores(first: int, last: int) -> torch.Tensor:
            """In float64, by operations on each head alone: which others a rank predicts cannot change a bit of it."""
            return pooled_scores(rows[first:last], grid.nq, tokens.scale, how.similarity)

        def chance(scores: torch.Tensor) -> torch.Tensor:
            """NaN where every key block is dissimilar, hence dense."""
            return torch.softmax(scores, dim=-1)

        dense = (rows[..., -1] <= how.similarity) | always_dense(
            grid, self.dense_text, self.attention_sink, rows.device
        )
        mine = select_in_parts(scores, chance, dense, grid.nq, how.limits(grid.nk))
        return BlockMask(gather_bits(mine, request.heads, samples, grid.nk, tokens.group), grid)


@functools.lru_cache(maxsize=8)
def always_dense(grid: BlockGrid, text: bool, attention_sink: bool, device: torch.device) -> torch.Tensor:
    """bool[nq + nk]: query blocks and then key blocks that are dense whatever the tokens are.

    text: whether blocks of text are;  attention_sink: whether the first key block is
    """
    q, k = ((axis.starts < grid.text_tokens) & text for axis in (grid.q_axis, grid.k_axis))
    k[0] |= attention_sink
    return to_device(np.concatenate([q, k]), device)
