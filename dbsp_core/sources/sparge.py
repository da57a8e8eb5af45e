"""Masks predicted from each attention's own queries and keys, before they are sent (SpargeAttn)."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from dbsp_core.masks.block_mask import BlockMask
from dbsp_core.masks.grid import BlockGrid
from dbsp_core.sources.base import BlockSizes, LocalQK, MaskRequest, PredictedSource
from dbsp_core.sources.head_shares import pool_own_heads, predict_bits
from dbsp_core.utils.errors import SettingError, require_value
from dbsp_kernels.prediction import pooled_scores, select_blocks
from dbsp_kernels.segments import to_device


@dataclass(frozen=True)
class LikeliestBlocks(PredictedSource):
    """Base of mask sources that keep each row's blocks of largest predicted attention probability.

    Attributes:
        cdf: Largest cumulative probability of the chosen blocks, of which there is at least one. Either this or topk.
        topk: Share of the row's blocks, rounded down, but at least one.
    """

    cdf: float | None = None
    topk: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, value in (("cdf", self.cdf), ("topk", self.topk)):
            require_value(self, name, value is None or 0 < value <= 1, "must be above 0 and at most 1")

    def limits(self, blocks: int) -> tuple[float | None, int]:
        """Returns the arguments `cdf` and `most` of `select_blocks` for rows of so many blocks."""
        if self.topk is not None:
            return None, max(1, math.floor(self.topk * blocks + 1e-9))
        return (None if self.cdf == 1 else self.cdf), blocks


LARGEST_BLOCK = 1 << 16
USUAL_CDF = 0.92  # xDiT's value


@dataclass(frozen=True)
class SpargeSource(LikeliestBlocks):
    """SpargeAttn's block predictor: pooled attention of each head shows where most of its probability will be.

    Each rank pools blocks of its own tokens, each head is predicted by one rank, and the bits are gathered, so that
    the plan is known before any q, k or v is sent. The bits do not depend on ranks and layout. Every sample of a batch
    has its own masks, as B·H heads. (Zhang et al., SpargeAttn: Accurate and Training-Free Sparse Attention
    Accelerating Any Model Inference, 2025. Self-similarity is the mean cosine of a block's tokens, as in its code.)

    Attributes:
        cdf: See `LikeliestBlocks`, as for topk; 0.92 as in xDiT if neither is given.
        similarity: Rows and columns of blocks whose tokens have a mean cosine of at most this are dense, as a mean
            does not represent them.
        crossing: True if the block with which a row exceeds cdf is chosen too: the fewest blocks with more than cdf.
    """

    similarity: float = 0.3
    crossing: bool = False
    approximates_dense: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.cdf is not None and self.topk is not None:
            message = "mask source 'sparge' needs either cdf or topk, and not both; cdf: 0.92 is what xDiT uses"
            raise SettingError(message, ("cdf",))
        if self.cdf is None and self.topk is None:
            object.__setattr__(self, "cdf", USUAL_CDF)
        is_cosine = -1 <= self.similarity <= 1
        require_value(self, "similarity", is_cosine, "is a cosine: it must lie between -1 and 1")
        if self.crossing and self.cdf is None:
            raise SettingError("crossing is about cdf; leave it out, or give cdf instead of topk", ("crossing",))
        require_poolable_blocks(self, "sparge")

    def mask(self, request: MaskRequest, tokens: LocalQK) -> BlockMask:
        """Predicts the mask. Collective."""
        grid = self.grid(request)
        some_are_dense = self.attention_sink or (self.dense_text and grid.text_tokens)

        def choose(rows: torch.Tensor) -> torch.Tensor:
            # Chances are NaN in rows whose key blocks are all dissimilar and therefore dense.
            chance = torch.softmax(pooled_scores(rows, grid.nq, tokens.scale, self.similarity), dim=-1)
            dense = rows[..., -1] <= self.similarity
            if some_are_dense:
                dense |= always_dense(grid, self.dense_text, self.attention_sink, rows.device)
            return select_blocks(chance, dense, *self.limits(grid.nk), self.crossing)

        return BlockMask(predict_bits(pool_own_heads(tokens, grid), choose, tokens, grid), grid)


def require_poolable_blocks(sizes: BlockSizes, source: str) -> None:
    """Raises SettingError for blocks whose tokens cannot be summed as `sum_tokens` does it."""
    for name in ("block_q", "block_k"):
        if getattr(sizes, name) > LARGEST_BLOCK:
            message = f"mask source {source!r} takes blocks of at most {LARGEST_BLOCK} tokens; 64 is usual"
            raise SettingError(message, (name,))


@functools.lru_cache(maxsize=8)
def always_dense(grid: BlockGrid, text: bool, attention_sink: bool, device: torch.device) -> torch.Tensor:
    """Returns bool[nq + nk]: query, then key blocks that are dense for any tokens: text, and the first key block."""
    q, k = ((axis.starts < grid.text_tokens) & text for axis in (grid.q_axis, grid.k_axis))
    k[0] |= attention_sink
    return to_device(np.concatenate([q, k]), device)
