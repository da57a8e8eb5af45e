"""Masks predicted from each attention's queries and keys before the exchange (SpargeAttn)."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from dbsp_core.masks.block_mask import BlockMask
from dbsp_core.masks.grid import BlockGrid
from dbsp_core.sources.base import ByStep, DenseText, LocalQK, MaskRequest, OrderedSource, kept_blocks
from dbsp_core.sources.head_shares import pool_own_heads, predict_bits
from dbsp_core.utils.errors import SettingError, require_value
from dbsp_kernels.prediction import pooled_scores, select_blocks
from dbsp_kernels.segments import to_device


@dataclass(frozen=True)
class LikeliestBlocks(OrderedSource):
    """Base of mask sources that keep each row's blocks of largest predicted attention probability.

    Set one of `cdf`, `topk` and `sparsity`.

    Attributes:
        cdf: Largest cumulative probability of the kept blocks; at least one block is kept.
        topk: Fraction of key blocks that a row keeps, rounded down, at least one block.
        sparsity: Fraction that is skipped. A row keeps ⌊(1 − sparsity) · n⌋ of n blocks, at least one, in LightX2V's
            floating point: 1 − 0.9 is less than 0.1, so 58 of 590, where topk 0.1 keeps 59.
    """

    cdf: ByStep | None = None
    topk: ByStep | None = None
    sparsity: ByStep | None = None
    scheduled: ClassVar[tuple[str, ...]] = ("cdf", "topk", "sparsity")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in self._given:
            if name == "sparsity":
                self._require_each(name, lambda share: 0 <= share < 1, "must be at least 0 and below 1")
            else:
                self._require_each(name, lambda share: 0 < share <= 1, "must be above 0 and at most 1")

    @property
    def _given(self) -> list[str]:
        return [name for name in LikeliestBlocks.scheduled if getattr(self, name) is not None]

    def limits(self, blocks: int, step: int) -> tuple[float | None, int]:
        """Returns `cdf` and `count` of `select_blocks` for rows of `blocks` blocks at a denoising step."""
        if self.topk is not None:
            return None, kept_blocks(self._at_step("topk", step) * blocks + 1e-9, blocks)
        if self.sparsity is not None:
            return None, kept_blocks((1 - self._at_step("sparsity", step)) * blocks, blocks)
        cdf = self._at_step("cdf", step)
        return (None if cdf == 1 else cdf), blocks


USUAL_CDF = 0.92  # xDiT's value


@dataclass(frozen=True)
class SpargeSource(LikeliestBlocks):
    """SpargeAttn's block predictor: keeps the blocks with most of each row's pooled attention probability.

    Each rank pools blocks of its tokens, each head is predicted by one rank, and the bits are gathered. The bits do
    not depend on ranks and layout. Every batch item has its own masks, as B·H heads. (Zhang et al., SpargeAttn:
    Accurate and Training-Free Sparse Attention Accelerating Any Model Inference, 2025. Self-similarity is the mean
    cosine of a block's tokens, as in its code.)

    Attributes:
        cdf: See `LikeliestBlocks`, like topk and sparsity; 0.92 as in xDiT if none is set.
        similarity: Blocks whose tokens have a mean cosine of at most this get dense rows and columns, since their mean
            does not represent them.
        crossing: True to also keep the block at which a row exceeds cdf: the fewest blocks with more than cdf.
    """

    similarity: float = 0.3
    crossing: bool = False
    approximates_dense: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self._given) > 1:
            message = "mask source 'sparge' takes only one of cdf, topk and sparsity; cdf: 0.92 is what xDiT uses"
            raise SettingError(message, (self._given[0],))
        if not self._given:
            object.__setattr__(self, "cdf", USUAL_CDF)
        is_cosine = -1 <= self.similarity <= 1
        require_value(self, "similarity", is_cosine, "is a cosine: it must lie between -1 and 1")
        if self.crossing and self.cdf is None:
            raise SettingError("crossing requires cdf; remove it, or set cdf", ("crossing",))

    def mask(self, request: MaskRequest, tokens: LocalQK) -> BlockMask:
        """Predicts the mask. Collective."""
        grid = self.grid(request)
        some_are_dense = self.attention_sink or (self.dense_text and grid.text_tokens)

        def choose(rows: torch.Tensor) -> torch.Tensor:
            # Chances are NaN in rows where all key blocks are dissimilar, which are dense.
            chance = torch.softmax(pooled_scores(rows, grid.nq, tokens.scale, self.similarity), dim=-1)
            dense = rows[..., -1] <= self.similarity
            if some_are_dense:
                dense |= always_dense(grid, self.dense_text, self.attention_sink, rows.device)
            return select_blocks(chance, dense, *self.limits(grid.nk, request.step), self.crossing)

        return BlockMask(predict_bits(pool_own_heads(tokens, grid), choose, tokens, grid), grid)


@functools.lru_cache(maxsize=8)
def always_dense(grid: BlockGrid, text: DenseText, attention_sink: bool, device: torch.device) -> torch.Tensor:
    """Returns bool[nq + nk], query blocks, then key blocks that are always dense: text, and an attention sink."""
    q = (grid.q_axis.starts < grid.text_tokens) & (text in (True, "rows"))
    k = (grid.k_axis.starts < grid.text_tokens) & (text in (True, "columns"))
    k[0] |= attention_sink
    return to_device(np.concatenate([q, k]), device)
