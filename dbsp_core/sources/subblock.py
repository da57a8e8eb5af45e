"""Masks by scores of parts of blocks, with equal numbers of blocks per row (SGLang's SubBlock)."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import numpy as np
import torch

from dbsp_core.masks.block_mask import BlockMask
from dbsp_core.masks.grid import BlockGrid
from dbsp_core.sources.base import ByStep, DenseText, LocalQK, MaskRequest, OrderedSource, kept_blocks
from dbsp_core.sources.head_shares import PAIRS_AT_ONCE, pool_own_heads, predict_bits
from dbsp_core.sources.sol import ANY_SIMILARITY
from dbsp_core.sources.sparge import always_dense
from dbsp_core.utils.errors import require_value
from dbsp_kernels.prediction import halving_sum, pooled_scores, select_blocks
from dbsp_kernels.segments import to_device


@dataclass(frozen=True)
class SubBlockSource(OrderedSource):
    """SubBlock: a row keeps the blocks of largest log Σ exp over the scores of their cells (parts of blocks).

    Predicted like `SpargeSource`. (SGLang's backend `subblock_sparse_attn` for MiniMax-H3, 2026.)

    Attributes:
        sparsity: Largest fraction of key blocks that a row skips: it keeps ⌈(1 − sparsity) · nk⌉, rounded up to a
            multiple of `multiple`.
        cells_q: Cells per query block, with equal numbers of tokens.
        cells_k: Cells per key block.
        multiple: The number of kept blocks is a multiple of this; 8 suits SGLang's kernel.
    """

    sparsity: ByStep = 0.75
    cells_q: int = 4
    cells_k: int = 4
    multiple: int = 8
    dense_text: DenseText = "rows"
    scheduled: ClassVar[tuple[str, ...]] = ("sparsity",)
    approximates_dense: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require_each("sparsity", lambda share: 0 <= share < 1, "must be at least 0 and below 1; 0.75 is usual")
        for block, cells in (("block_q", "cells_q"), ("block_k", "cells_k")):
            parts = getattr(self, cells)
            divides = parts >= 1 and getattr(self, block) % parts == 0
            require_value(self, cells, divides, f"must divide {block}={getattr(self, block)}; 4 is usual")
        require_value(self, "multiple", self.multiple >= 1, "must be at least 1; 8 is usual")

    def mask(self, request: MaskRequest, tokens: LocalQK) -> BlockMask:
        """Predicts the mask. Collective."""
        grid, device = self.grid(request), tokens.q.device
        cells = _Cells.of(grid, self.cells_q, self.cells_k, device)
        dense = always_dense(grid, self.dense_text, self.attention_sink, device)
        wanted = (1 - self._at_step("sparsity", request.step)) * grid.nk
        count = kept_blocks(wanted, grid.nk, round_up=True, multiple=self.multiple)

        def choose(some: torch.Tensor) -> torch.Tensor:
            # 1. Cells of keys, [heads, cells, D + 1] → [heads, nk · c, D + 1]; empty cells score −inf by their
            # similarity
            keys = some[:, cells.grid.nq :].index_select(1, cells.k.flatten())
            keys[..., -1].masked_fill_(~cells.k_real.flatten(), ANY_SIMILARITY)
            chance = some.new_empty(len(some), grid.nq, grid.nk, dtype=torch.float64)
            pairs = max(1, len(some)) * cells.k.numel() * self.cells_q  # per row; a rank may have no heads
            at_once = max(1, PAIRS_AT_ONCE["cuda" if some.is_cuda else "cpu"] // pairs)
            parts = cells.q.split(at_once), cells.q_real.split(at_once), chance.split(at_once, dim=1)
            for q, real, part in zip(*parts, strict=True):
                # 2. Scores of pairs of cells, [heads, n · c, nk · c] → [heads, n, c, nk, c]
                rows = torch.cat([some.index_select(1, q.flatten()), keys], dim=1)
                scores = pooled_scores(rows, q.numel(), tokens.scale, ANY_SIMILARITY)
                scores = scores.unflatten(2, cells.k.shape).unflatten(1, q.shape)
                scores.masked_fill_(~real[:, :, None, None], -torch.inf)
                # 3. Mean of exp over the cells of two blocks, relative to the row's maximum
                scores.sub_(scores.amax((2, 3, 4), keepdim=True)).exp_()
                part.copy_(halving_sum(scores.transpose(2, 3).flatten(3)) / (self.cells_q * self.cells_k))
            return select_blocks(chance, dense.expand(len(some), -1), None, count)

        return BlockMask(predict_bits(pool_own_heads(tokens, cells.grid), choose, tokens, grid), grid)


class _Cells(NamedTuple):
    """The cells of a grid's blocks, as a grid."""

    grid: BlockGrid
    q: torch.Tensor  # int64[nq, cells_q], cells of each query block
    q_real: torch.Tensor  # bool[nq, cells_q], False for empty cells
    k: torch.Tensor  # int64[nk, cells_k]
    k_real: torch.Tensor  # bool[nk, cells_k]

    @classmethod
    @functools.lru_cache(maxsize=8)  # equal in every attention of a video size
    def of(cls, grid: BlockGrid, cells_q: int, cells_k: int, device: torch.device) -> _Cells:
        """Cuts each block into cells_q or cells_k cells."""
        of_cells, tables = replace(grid, block_q=grid.block_q // cells_q, block_k=grid.block_k // cells_k), []
        axes = (grid.q_axis, of_cells.q_axis, cells_q), (grid.k_axis, of_cells.k_axis, cells_k)
        for blocks, axis, cells in axes:
            number = np.arange(cells)
            first = np.searchsorted(axis.starts, blocks.starts)
            real = number < np.diff(first, append=len(axis))[:, None]
            tables += [np.where(real, first[:, None] + number, 0), real]
        return cls(of_cells, *(to_device(table, device) for table in tables))
