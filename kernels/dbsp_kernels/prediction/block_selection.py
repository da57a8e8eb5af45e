"""Chooses the blocks that each row attends to from pooled queries and keys, as bits: all heads in three operations."""

from __future__ import annotations

import torch

from dbsp_kernels.dispatch import uses_triton
from dbsp_kernels.packing.row_bits import pack_bits

__all__ = ["pairs_at_once", "pooled_scores", "pooled_scores_torch", "select_blocks", "select_blocks_torch"]


BITS = 21
"""Magnitudes of a row's elements are rounded to so many bits: products of 2048 of them add up exactly in float64."""
SCALE_EXPONENT = BITS + 126 + 127
"""The biased exponent of a row's scale in float32, with that of its largest element: of 2^BITS over 2^(e − 126)."""
LEAST_EXPONENT = SCALE_EXPONENT - 254
"""Smaller elements count as if the largest one had this exponent, of which the scale is still a float32."""
UNIT_EXPONENT = 1023 - 126 - BITS
"""The biased exponent of the scale's inverse in float64, less that of the row's largest element in float32."""


def pairs_at_once(on_gpu: bool) -> int:
    """Number of block pairs to choose among at a time: enough to be fast, few enough to need little memory.

    On the CPU torch's own operations take some 50 bytes for each; the kernels a score and a chance of 8 bytes.
    """
    return 1 << (24 if on_gpu else 20)


def pooled_scores(rows: torch.Tensor, nq: int, scale: float, similarity: float) -> torch.Tensor:
    """Scores of mean queries and keys, −inf at key blocks whose similarity is at or below `similarity`.

    Each row's D elements are rounded to whole numbers of 22 bits, in units of a power of two. Their products and sums
    are exact, in float64 as in integers, so that no order of summation and no device can change a bit.

    Args:
        rows: float32[heads, nq + nk, D + 1], from `pool_rows`: of queries and then of keys; finite, D ≤ 2048.

    Returns:
        float64[heads, nq, nk].
    """
    if uses_triton(rows):
        from dbsp_kernels.triton.block_selection import pooled_scores_triton  # here: triton need not be installed

        return pooled_scores_triton(rows, nq, scale, similarity, SCALE_EXPONENT, LEAST_EXPONENT, UNIT_EXPONENT)
    return pooled_scores_torch(rows, nq, scale, similarity)


def pooled_scores_torch(rows: torch.Tensor, nq: int, scale: float, similarity: float) -> torch.Tensor:
    """`pooled_scores` by torch's own operations."""
    means = rows[..., :-1]
    # |x| < 2^(exponent − 126), and scaling by powers of two is exact.
    exponent = (means.abs().amax(dim=-1).view(torch.int32) >> 23).clamp_(min=LEAST_EXPONENT)
    scaled = means * (SCALE_EXPONENT - exponent << 23).view(torch.float32)[..., None]
    whole, unit = scaled.round_().double(), (exponent.long() + UNIT_EXPONENT << 52).view(torch.float64)
    scores = torch.bmm(whole[:, :nq], whole[:, nq:].mT)
    scores.mul_(unit[:, :nq, None] * scale).mul_(unit[:, None, nq:])
    return scores.masked_fill_(rows[:, None, nq:, -1] <= similarity, -torch.inf)


def select_blocks(
    chance: torch.Tensor, dense: torch.Tensor, cdf: float | None, count: int, crossing: bool = False
) -> torch.Tensor:
    """The blocks of largest chance in each row, ties to the lower column, and dense rows and columns, as bits.

    On a GPU chances are added up exactly, in units of 2^-60; on the CPU in float64, one after the other.

    Args:
        chance: float64[heads, nq, nk], at least 0; NaN counts as 0.
        dense: bool[heads, nq + nk], rows and then columns that are dense in any case.
        cdf: As many blocks as have a cumulative chance of at most this, but at least one; None: `count` of them.
        crossing: Whether the next block is taken too, with which the cumulative chance exceeds `cdf`.

    Returns:
        uint8[heads, nq, ceil(nk / 8)], as `pack_bits` packs them.
    """
    if uses_triton(chance):
        from dbsp_kernels.triton.block_selection import select_blocks_triton  # here: triton need not be installed

        return select_blocks_triton(chance, dense, cdf, count, crossing)
    return select_blocks_torch(chance, dense, cdf, count, crossing)


def select_blocks_torch(
    chance: torch.Tensor, dense: torch.Tensor, cdf: float | None, count: int, crossing: bool = False
) -> torch.Tensor:
    """`select_blocks` by torch's own operations."""
    nq, nk = chance.shape[1:]
    ordered, block = torch.sort(chance.nan_to_num(0.0), dim=-1, descending=True, stable=True)
    place = torch.arange(nk, device=chance.device)
    if cdf is None:
        taken = (place < count).expand_as(chance)
    else:
        taken = ordered.cumsum(-1) <= cdf
        if crossing:
            taken = taken.roll(1, dims=-1)
        taken[..., 0] = True
    chosen = torch.zeros_like(chance, dtype=torch.bool).scatter_(-1, block, taken)
    return pack_bits(chosen | dense[:, :nq, None] | dense[:, None, nq:])
