"""Which blocks a head attends to, predicted from pooled queries and keys (SpargeAttn, §3.2 and Alg. 1)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from dbsp_core.errors import SettingError, bad_value
from dbsp_core.sources.pooling import Pooled

__all__ = ["Selection", "select_blocks"]


@dataclass(frozen=True)
class Selection:
    """How blocks are chosen in each row of pooled attention probabilities, largest first. One of cdf and topk is set.

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
            if value is not None and not 0 < value <= 1:
                raise bad_value(self, name, "must be above 0 and at most 1")
        if not -1 <= self.similarity <= 1:
            raise bad_value(self, "similarity", "is a cosine: it must lie between -1 and 1")


def select_blocks(q: Pooled, k: Pooled, scale: float, how: Selection) -> torch.Tensor:
    """The dense blocks of one head. returns: bool[nq, nk]

    q, k: of one head, mean [nq, D] and [nk, D]

    In float64, by operations on this head alone: which other heads a rank decides cannot change a bit of it.
    """
    vague_q, vague_k = (side.similarity <= how.similarity for side in (q, k))
    scores = q.mean.double() @ k.mean.double().T * scale
    scores.masked_fill_(vague_k, -torch.inf)
    chance = torch.softmax(scores, dim=-1).nan_to_num_(0.0)  # NaN where every key block is vague, hence dense
    ordered, block = torch.sort(chance, dim=-1, descending=True, stable=True)
    chosen = torch.zeros_like(chance, dtype=torch.bool).scatter_(-1, block, _leading(ordered, how))
    return chosen | vague_q[:, None] | vague_k


def _leading(chance: torch.Tensor, how: Selection) -> torch.Tensor:
    """Which of each row's entries, sorted by falling chance, are taken. bool[nq, nk]"""
    count = chance.shape[-1]
    place = torch.arange(count, device=chance.device)
    if how.topk is not None:
        return (place < max(1, math.floor(how.topk * count + 1e-9))).expand_as(chance)
    if how.cdf is None or how.cdf == 1:
        return torch.ones_like(chance, dtype=torch.bool)
    return (chance.cumsum(-1) <= how.cdf) | (place == 0)
