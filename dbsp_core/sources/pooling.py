"""Means and self-similarities of blocks from the tokens that ranks hold, the same bits however they are shared out.

Floating-point sums depend on their order, and a block cut between ranks is summed in another order than one that is
not. So everything that is summed over tokens is summed as integers in fixed point, and sums over the D elements of a
token are taken pairwise in one fixed order, of which every step is an IEEE operation: CPU and GPU agree.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["BlockSums", "Pooled", "pool", "sum_by_block"]

LIMIT = 2.0**15  # magnitudes beyond it count as it: no attention has such queries or keys
MEAN_UNIT = 2.0**-32  # with LIMIT, int64 holds the sum of 2**16 tokens
DIRECTION_UNIT = 2.0**-20
CHUNK_BYTES = 64 << 20  # of widened tokens in memory at a time


@dataclass(frozen=True, eq=False)
class BlockSums:
    """Sums over the tokens of blocks, or over those that one rank has. int64[..., blocks, D] each.

    values:     of the tokens, in units of MEAN_UNIT
    directions: of the tokens divided by their length, in units of DIRECTION_UNIT
    """

    values: torch.Tensor
    directions: torch.Tensor


@dataclass(frozen=True, eq=False)
class Pooled:
    """mean: float32[..., blocks, D];  similarity: float32[..., blocks], the mean cosine of all pairs of tokens"""

    mean: torch.Tensor
    similarity: torch.Tensor

    def of(self, item: int, head: int) -> Pooled:
        """Of one head of one batch item."""
        return Pooled(self.mean[item, head], self.similarity[item, head])


def sum_by_block(tokens: torch.Tensor, block: torch.Tensor, blocks: int) -> BlockSums:
    """Sums tokens that share a block.

    tokens: [B, H, n, D], any floating dtype;  block: int64[n], the block of each, below `blocks`
    """
    batch, heads, count, width = tokens.shape
    sums = [torch.zeros(batch, heads, blocks, width, dtype=torch.int64, device=tokens.device) for _ in range(2)]
    chunk = max(1, CHUNK_BYTES // max(1, batch * count * width * 8))
    for first in range(0, heads, chunk):
        part = tokens[:, first : first + chunk].float()
        part = torch.nan_to_num(part, nan=0.0).clamp_(-LIMIT, LIMIT)
        values = (part.double() / MEAN_UNIT).round_().long()
        sums[0][:, first : first + chunk].index_add_(2, block, values)
        length = _tree_sum(part * part).sqrt_().unsqueeze(-1)
        part = torch.where(length > 0, part / length, torch.zeros_like(part))
        directions = (part / DIRECTION_UNIT).round_().long()
        sums[1][:, first : first + chunk].index_add_(2, block, directions)
    return BlockSums(*sums)


def pool(sums: BlockSums, lengths: torch.Tensor) -> Pooled:
    """Means and similarities of whole blocks. lengths: int64[blocks], tokens of each

    The mean cosine of all pairs of n directions, each with itself included, is |Σ directions|² / n².
    """
    mean = sums.values.double() * MEAN_UNIT / lengths[:, None]
    direction = sums.directions.double() * DIRECTION_UNIT / lengths[:, None]
    return Pooled(mean.float(), _tree_sum(direction * direction).float())


def _tree_sum(terms: torch.Tensor) -> torch.Tensor:
    """Σ over the last dimension in one fixed order: halves are added until one is left. terms: [..., D]"""
    width = 1 << (terms.shape[-1] - 1).bit_length()
    terms = torch.nn.functional.pad(terms, (0, width - terms.shape[-1]))
    while width > 1:
        width //= 2
        terms = terms[..., :width] + terms[..., width:]
    return terms[..., 0]
