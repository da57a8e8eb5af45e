"""Masks predicted from each attention's own queries and keys, before they travel (SpargeAttn)."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import torch

from dbsp_core.masks.block_mask import BlockMask
from dbsp_core.masks.grid import BlockGrid
from dbsp_core.masks.token_order import CANONICAL, require_order
from dbsp_core.sources.base import BlockSizes, Changes, LocalQK, MaskRequest
from dbsp_core.sources.distributed_pooling import Pooled, gather_bits, pool_own_heads
from dbsp_core.utils.errors import SettingError, blame_setting, require_value

__all__ = ["SpargeSource", "SpargeThresholds", "select_blocks"]


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


def select_blocks(q: Pooled, k: Pooled, scale: float, how: SpargeThresholds) -> torch.Tensor:
    """The dense blocks of one head. returns: bool[nq, nk]

    q, k: of one head, mean [nq, D] and [nk, D]

    In float64, by operations on only this head: which other heads a rank predicts cannot change a bit of it.
    """
    dissimilar_q, dissimilar_k = (side.similarity <= how.similarity for side in (q, k))
    scores = q.mean.double() @ k.mean.double().T * scale
    scores.masked_fill_(dissimilar_k, -torch.inf)
    chance = torch.softmax(scores, dim=-1).nan_to_num_(0.0)  # NaN where every key block is dissimilar, hence dense
    ordered, block = torch.sort(chance, dim=-1, descending=True, stable=True)
    chosen = torch.zeros_like(chance, dtype=torch.bool).scatter_(-1, block, _leading(ordered, how))
    return chosen | dissimilar_q[:, None] | dissimilar_k


def _leading(chance: torch.Tensor, how: SpargeThresholds) -> torch.Tensor:
    """Which of each row's entries, sorted by falling chance, are taken. bool[nq, nk]"""
    count = chance.shape[-1]
    place = torch.arange(count, device=chance.device)
    if how.topk is not None:
        return (place < max(1, math.floor(how.topk * count + 1e-9))).expand_as(chance)
    if how.cdf is None or how.cdf == 1:
        return torch.ones_like(chance, dtype=torch.bool)
    return (chance.cumsum(-1) <= how.cdf) | (place == 0)


LARGEST_BLOCK = 1 << 16


@dataclass(frozen=True)
class SpargeSource(BlockSizes):
    """SpargeAttn's block predictor: each head's pooled attention says where most of its probability will be.

    cdf, topk, similarity: see `SpargeThresholds`; one of cdf and topk is needed
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
        grid = self.grid(request)
        q, k = pool_own_heads(tokens, grid)
        mine = self._predict(q, k, tokens.scale)
        bits = gather_bits(mine, request.heads, tokens.group).flatten(0, 1)
        if self.attention_sink:
            bits[:, :, 0] = True
        if self.dense_text:
            grid.make_text_dense(bits)
        return BlockMask(bits, grid)

    def _predict(self, q: Pooled, k: Pooled, scale: float) -> torch.Tensor:
        """bool[B, Hs, nq, nk]. q, k: [B, Hs, ...]"""
        batch, heads, nq, _ = q.mean.shape
        bits = torch.empty(batch, heads, nq, k.mean.shape[2], dtype=torch.bool, device=q.mean.device)
        for sample, head in itertools.product(range(batch), range(heads)):
            bits[sample, head] = select_blocks(q.of(sample, head), k.of(sample, head), scale, self.thresholds)
        return bits
