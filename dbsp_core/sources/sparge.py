"""Masks predicted from each attention's own queries and keys, before they travel (SpargeAttn)."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from dbsp_core.masks.block_mask import BlockMask
from dbsp_core.masks.grid import BlockGrid
from dbsp_core.sources.base import BlockSizes, LocalQK, MaskRequest, PredictedSource
from dbsp_core.sources.head_shares import gather_bits, pool_own_heads
from dbsp_core.utils.errors import SettingError, require_value
from dbsp_kernels.exchange import to_device
from dbsp_kernels.prediction import pairs_at_once, pooled_scores, select_blocks

__all__ = ["LikeliestBlocks", "SpargeSource", "always_dense", "require_poolable_blocks", "select_in_parts"]


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
USUAL_CDF = 0.92
"""xDiT's value."""


@dataclass(frozen=True)
class SpargeSource(LikeliestBlocks):
    """SpargeAttn's block predictor: pooled attention of each head shows where most of its probability will be.

    Each rank pools blocks of its own tokens, each head is predicted by one rank, and the bits are gathered, so that
    the plan is known before any q, k or v travels. The bits do not depend on ranks and layout. Every sample of a batch
    has its own masks, as B·H heads. (Zhang et al., SpargeAttn: Accurate and Training-Free Sparse Attention
    Accelerating Any Model Inference, 2025. Self-similarity is the mean cosine of a block's tokens, as in its code.)

    Attributes:
        cdf: See `LikeliestBlocks`, as for topk; 0.92 as in xDiT if neither is given.
        similarity: Rows and columns of blocks whose tokens have a mean cosine of at most this are dense, as a mean
            does not represent them.
        crossing: Whether the block with which a row exceeds cdf is chosen too: the fewest blocks with more than cdf.
    """

    similarity: float = 0.3
    crossing: bool = False

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
        rows = pool_own_heads(tokens, grid).flatten(0, 1)

        def scores(first: int, last: int) -> torch.Tensor:
            """Returns float64 scores by operations on single heads: the other heads of a rank cannot change a bit."""
            return pooled_scores(rows[first:last], grid.nq, tokens.scale, self.similarity)

        def chance(scores: torch.Tensor) -> torch.Tensor:
            """Returns probabilities; NaN in rows whose key blocks are all dissimilar and therefore dense."""
            return torch.softmax(scores, dim=-1)

        dense = rows[..., -1] <= self.similarity
        if self.attention_sink or (self.dense_text and grid.text_tokens):
            dense |= always_dense(grid, self.dense_text, self.attention_sink, rows.device)
        mine = select_in_parts(scores, chance, dense, grid.nq, (*self.limits(grid.nk), self.crossing))
        return BlockMask(gather_bits(mine, tokens, grid.nk), grid)


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


def select_in_parts(
    scores_of: Callable[[int, int], torch.Tensor],
    chance_of: Callable[[torch.Tensor], torch.Tensor],
    dense: torch.Tensor,
    nq: int,
    limits: tuple[float | None, int, bool],
) -> torch.Tensor:
    """Runs `select_blocks` for all heads, part by part, as memory would grow with the square of the tokens.

    `scores_of` maps (first, last) to the scores of these heads, float64[heads, nq, nk]. `chance_of` turns rows of
    scores into probabilities, each row by itself, so that parts cannot change a bit.
    """
    heads, nk = len(dense), dense.shape[1] - nq
    at_once = pairs_at_once(dense.is_cuda)
    together = max(1, at_once // (nq * nk))
    rows = nq if nq * nk <= at_once else max(1, at_once // nk)
    found = []
    for first in range(0, max(1, heads), together):
        scores, own = scores_of(first, first + together), dense[first : first + together]
        by_rows = [
            select_blocks(chance_of(some), _of_rows(own, nq, row, some.shape[1]), *limits)
            for row, some in zip(range(0, nq, rows), scores.split(rows, dim=1), strict=True)
        ]
        found.append(by_rows[0] if len(by_rows) == 1 else torch.cat(by_rows, dim=1))
    return found[0] if len(found) == 1 else torch.cat(found)


def _of_rows(dense: torch.Tensor, nq: int, first: int, count: int) -> torch.Tensor:
    """Returns bool[heads, count + nk]: `dense` for some rows and all columns."""
    if count == nq:
        return dense
    return torch.cat([dense[:, first : first + count], dense[:, nq:]], dim=1)
