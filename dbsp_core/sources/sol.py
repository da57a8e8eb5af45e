"""Masks by a threshold on pooled scores, with unequal numbers of blocks per row (Sol-Attn)."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import torch

from dbsp_core.masks.block_mask import BlockMask
from dbsp_core.masks.grid import BlockGrid
from dbsp_core.sources.base import ByStep, LocalQK, MaskRequest, OrderedSource
from dbsp_core.sources.head_shares import pool_own_heads, predict_bits
from dbsp_core.sources.sparge import always_dense
from dbsp_core.utils.schema import require_choice
from dbsp_kernels.prediction import halving_sum, pooled_scores
from dbsp_kernels.segments import to_device
from dbsp_kernels.tables import pack_bits

LEAST_VARIANCE = 1e-6 * math.log(2) ** 2  # added to the variance of scores: 1e-6 of scores in base 2
NEIGHBOURS = 1  # dense key blocks on each side of a query block's own
ANY_SIMILARITY = -2.0  # below every cosine: disables the similarity test


@dataclass(frozen=True)
class SolSource(OrderedSource):
    """Sol-Attn's routing: a row keeps key blocks with pooled scores more than τ deviations above the row's mean.

    It also keeps the blocks at its own position and next to it. Rows keep unequal numbers of blocks. Predicted like
    `SpargeSource`, with masks per batch item. (Sol-Attn: Accelerating Video Generation Inference via On-the-Fly
    Attention Sparsification, arXiv 2607.24027, 2026.)

    Attributes:
        tau: Standard deviations above the mean of a row's scores; larger keeps fewer blocks.
        thresh_type: How to compute the variance of a row's scores: "diag" from each channel of the pooled keys, as if
            channels were independent; "exact" from the scores.
    """

    tau: ByStep = 1.0
    thresh_type: Literal["diag", "exact"] = "diag"
    scheduled: ClassVar[tuple[str, ...]] = ("tau",)
    approximates_dense: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require_each("tau", math.isfinite, "must be a finite number; 1.0 is usual")
        require_choice("thresh_type", self.thresh_type, ("diag", "exact"), "mask.")

    def mask(self, request: MaskRequest, tokens: LocalQK) -> BlockMask:
        """Predicts the mask. Collective."""
        grid = self.grid(request)
        rows = pool_own_heads(tokens, grid)
        dense = always_dense(grid, self.dense_text, self.attention_sink, rows.device)
        tau: float = self._at_step("tau", request.step)
        anyway = dense[: grid.nq, None] | dense[grid.nq :] | _near(grid, rows.device)

        def choose(some: torch.Tensor) -> torch.Tensor:
            scores = pooled_scores(some, grid.nq, tokens.scale, ANY_SIMILARITY)
            threshold = self._thresholds(some, scores, tokens.scale, tau)
            return pack_bits((scores > threshold[..., None]) | anyway)

        return BlockMask(predict_bits(rows, choose, tokens, grid), grid)

    def _thresholds(self, rows: torch.Tensor, scores: torch.Tensor, scale: float, tau: float) -> torch.Tensor:
        """Returns thresholds float64[heads, nq] for rows of `pool_own_heads` and scores float64[heads, nq, nk].

        Sums are per head and in a fixed order, so they do not depend on other heads and ranks.
        """
        nq, nk = scores.shape[1:]
        mean = halving_sum(scores) / nk
        if self.thresh_type == "exact":
            apart = scores - mean[..., None]
            variance = halving_sum(apart * apart) / nk
        else:
            q, k = rows[:, :nq, :-1].double(), rows[:, nq:, :-1].mT.double()  # [heads, nq, D], [heads, D, nk]
            apart = k - (halving_sum(k) / nk)[..., None]
            of_channels = halving_sum(apart * apart) / nk
            variance = halving_sum(q * q * of_channels[:, None]) * scale**2
        return mean + tau * (variance + LEAST_VARIANCE).sqrt()


@functools.lru_cache(maxsize=8)
def _near(grid: BlockGrid, device: torch.device) -> torch.Tensor:
    """Returns bool[nq, nk]: key blocks with tokens of a query block, and their neighbors."""
    q, block_of = grid.q_axis, grid.k_axis.block_of
    first, last = block_of[q.starts] - NEIGHBOURS, block_of[q.starts + q.lengths - 1] + NEIGHBOURS
    block = np.arange(grid.nk)
    return to_device((block >= first[:, None]) & (block <= last[:, None]), device)
