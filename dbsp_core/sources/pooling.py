"""Means and self-similarities of blocks, from sums that do not depend on how tokens are shared out."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dbsp_kernels.fixed_point import DIRECTION_UNIT, MEAN_UNIT
from dbsp_kernels.pooling import halving_sum

__all__ = ["Pooled", "pool"]


@dataclass(frozen=True, eq=False)
class Pooled:
    """mean: float32[..., blocks, D];  similarity: float32[..., blocks], the mean cosine of all pairs of tokens"""

    mean: torch.Tensor
    similarity: torch.Tensor

    def of(self, item: int, head: int) -> Pooled:
        """Of one head of one batch item."""
        return Pooled(self.mean[item, head], self.similarity[item, head])


def pool(values: torch.Tensor, directions: torch.Tensor, lengths: torch.Tensor) -> Pooled:
    """Of whole blocks. values, directions: int64[..., blocks, D], as `sum_tokens` gives them;  lengths: int64[blocks]

    The mean cosine of all pairs of n directions, each with itself included, is |Σ directions|² / n².
    """
    mean = values.double() * MEAN_UNIT / lengths[:, None]
    direction = directions.double() * DIRECTION_UNIT / lengths[:, None]
    return Pooled(mean.float(), halving_sum(direction * direction).float())
