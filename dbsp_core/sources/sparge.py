"""Masks predicted from each attention's own queries and keys, before they travel (SpargeAttn)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dbsp_core.errors import SettingError, UserError, blaming
from dbsp_core.grid import BlockGrid
from dbsp_core.mask import BlockMask
from dbsp_core.order import CANONICAL, require_order
from dbsp_core.sources.base import HomeTokens, MaskRequest, Varies
from dbsp_core.sources.blocks import BlockSizes
from dbsp_core.sources.exchange import gather_bits, pool_own_heads
from dbsp_core.sources.pooling import Pooled
from dbsp_core.sources.selection import Selection, select_blocks

__all__ = ["SpargeSource"]

LARGEST_BLOCK = 1 << 16


@dataclass(frozen=True)
class SpargeSource(BlockSizes):
    """SpargeAttn's block predictor: each head's pooled attention says where most of its probability will be.

    cdf, topk, similarity: see `Selection`; one of cdf and topk is needed
    sink:       whether the first key block is dense in every row (attention sink)
    dense_text: whether rows and columns of text are dense
    order:      the token order that is cut into blocks; see `dbsp_core.order`

    Blocks are pooled from each rank's home tokens, each head is decided by one rank, and the bits are shared, so that
    the plan is known before any q, k or v travels, for every strategy. The bits are those that a single process would
    predict, whatever the ranks and the home layout. Every item of a batch has masks of its own, as B·H heads.
    Zhang et al., SpargeAttn: Accurate and Training-Free Sparse Attention Accelerating Any Model Inference, 2025. As in
    its published implementation, self-similarity is the mean cosine of a block's tokens.
    """

    cdf: float | None = None
    topk: float | None = None
    similarity: float = 0.3
    sink: bool = False
    dense_text: bool = True
    order: str = CANONICAL

    def __post_init__(self) -> None:
        super().__post_init__()
        with blaming("order"):
            require_order(self.order)
        self.selection  # noqa: B018  raises for values out of range
        for name in ("block_q", "block_k"):
            if getattr(self, name) > LARGEST_BLOCK:
                message = f"mask source 'sparge' takes blocks of at most {LARGEST_BLOCK} tokens; 64 is usual"
                raise SettingError(message, (name,))

    @property
    def selection(self) -> Selection:
        return Selection(self.cdf, self.topk, self.similarity)

    @property
    def varies(self) -> Varies:
        return "calls"

    def grid(self, request: MaskRequest) -> BlockGrid:
        sizes = request.tokens, request.text_tokens, self.block_q, self.block_k
        return BlockGrid(*sizes, request.thw, (self.order,))

    def mask(self, request: MaskRequest, tokens: HomeTokens | None = None) -> BlockMask:
        """Collective. Raises ValueError without tokens."""
        if tokens is None:
            raise UserError(
                "mask source 'sparge' predicts masks from queries and keys: there are none before a model runs"
            )
        grid = self.grid(request)
        q, k = pool_own_heads(tokens, grid)
        mine = self._decide(q, k, tokens.scale)
        bits = gather_bits(mine, request.heads, tokens.group).flatten(0, 1)
        self._force(bits, grid)
        return BlockMask(bits, grid)

    def _decide(self, q: Pooled, k: Pooled, scale: float) -> torch.Tensor:
        """bool[B, Hs, nq, nk]. q, k: [B, Hs, ...]"""
        batch, heads, nq, _ = q.mean.shape
        bits = torch.empty(batch, heads, nq, k.mean.shape[2], dtype=torch.bool, device=q.mean.device)
        for item in range(batch):
            for head in range(heads):
                bits[item, head] = select_blocks(q.of(item, head), k.of(item, head), scale, self.selection)
        return bits

    def _force(self, bits: torch.Tensor, grid: BlockGrid) -> None:
        if self.sink:
            bits[:, :, 0] = True
        if self.dense_text:
            bits[:, : int((grid.q_axis.starts < grid.text_tokens).sum())] = True  # text stands first
            bits[:, :, : int((grid.k_axis.starts < grid.text_tokens).sum())] = True
