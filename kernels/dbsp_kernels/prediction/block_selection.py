"""Chooses the blocks that each row attends to from pooled queries and keys, as bits: all heads in three operations."""

from __future__ import annotations

import torch

from dbsp_kernels.packing.row_bits import pack_bits
from dbsp_kernels.prediction.pooling import with_triton

__all__ = ["pairs_at_once", "pooled_scores", "pooled_scores_torch", "select_blocks", "select_blocks_torch"]


def pairs_at_once(on_gpu: bool) -> int:
    """Number of block pairs to choose among at a time: enough to be fast, few enough to need little memory.

    On the CPU torch's own operations take some 50 bytes for each; the kernels a score and a chance of 8 bytes.
    """
    return 1 << (24 if on_gpu else 20)


def pooled_scores(rows: torch.Tensor, nq: int, scale: float, similarity: float) -> torch.Tensor:
    """Scores of mean queries and keys, −inf at key blocks whose similarity is at or below `similarity`.

    The scores of a head depend on nothing but that head: which others a rank has cannot change a bit.

    Args:
        rows: float32[heads, nq + nk, D + 1], from `pool_rows`: of queries and then of keys.

    Returns:
        float64[heads, nq, nk].
    """
    if with_triton(rows):
        from dbsp_kernels.triton.block_selection import pooled_scores_triton  # here: triton need not be installed

        return pooled_scores_triton(rows, nq, scale, similarity)
    return pooled_scores_torch(rows, nq, scale, similarity)


def pooled_scores_torch(rows: torch.Tensor, nq: int, scale: float, similarity: float) -> torch.Tensor:
    """`pooled_scores` by torch's own operations."""
    wide = rows[..., :-1].double()
    scores = wide.new_empty(len(rows), nq, rows.shape[1] - nq)
    for head, out in zip(wide, scores, strict=True):  # not in a batch, which may round otherwise
        torch.mm(head[:nq], head[nq:].T, out=out)
    return scores.mul_(scale).masked_fill_(rows[:, None, nq:, -1] <= similarity, -torch.inf)


def select_blocks(chance: torch.Tensor, dense: torch.Tensor, cdf: float | None, count: int) -> torch.Tensor:
    """The blocks of largest chance in each row, ties to the lower column, and dense rows and columns, as bits.

    On a GPU chances are added up exactly, in units of 2^-60; on the CPU in float64, one after the other.

    Args:
        chance: float64[heads, nq, nk], at least 0; NaN counts as 0.
        dense: bool[heads, nq + nk], rows and then columns that are dense in any case.
        cdf: As many blocks as have a cumulative chance of at most this, but at least one; None: `count` of them.

    Returns:
        uint8[heads, nq, ceil(nk / 8)], as `pack_bits` packs them.
    """
    if with_triton(chance):
        from dbsp_kernels.triton.block_selection import select_blocks_triton  # here: triton need not be installed

        return select_blocks_triton(chance, dense, cdf, count)
    return select_blocks_torch(chance, dense, cdf, count)


def select_blocks_torch(chance: torch.Tensor, dense: torch.Tensor, cdf: float | None, count: int) -> torch.Tensor:
    """`select_blocks` by torch's own operations."""
    nq, nk = chance.shape[1:]
    ordered, block = torch.sort(chance.nan_to_num(0.0), dim=-1, descending=True, stable=True)
    place = torch.arange(nk, device=chance.device)
    taken = (place < count).expand_as(chance) if cdf is None else (ordered.cumsum(-1) <= cdf) | (place == 0)
    chosen = torch.zeros_like(chance, dtype=torch.bool).scatter_(-1, block, taken)
    return pack_bits(chosen | dense[:, :nq, None] | dense[:, None, nq:])
