"""Sums of the tokens of blocks, the same bits however tokens are distributed: what block predictors pool from.

Floating-point sums depend on their order, and a block cut between ranks is summed in another order than one that is
not. So what is summed over tokens is summed as integers in fixed point, and sums over the D elements of a token are
taken pairwise in one fixed order, of which every step is an IEEE operation: CPU and GPU agree.
"""

from __future__ import annotations

import importlib.util
import os

import torch

__all__ = ["DIRECTION_UNIT", "MEAN_UNIT", "halving_sum", "sum_tokens", "sum_tokens_torch"]

# The fixed point that every implementation of `sum_tokens` rounds to.
LIMIT = 2.0**15  # magnitudes beyond it count as it: no attention has such queries or keys
MEAN_UNIT = 2.0**-32  # with LIMIT, int64 holds the sum of 2**16 tokens
DIRECTION_UNIT = 2.0**-20

CHUNK_BYTES = 64 << 20  # of widened tokens in memory at a time


def sum_tokens(tokens: torch.Tensor, place: torch.Tensor, first: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Sums over the tokens of each block.

    tokens:  [B, H, n, D], float32, bfloat16 or float16, any strides
    place:   int64[m], which of the n are summed, block after block
    first:   int64[blocks + 1], where each block's begin in `place`, and where the last one's end
    returns: int64[B, H, blocks, D] each: the sum of values, in units of MEAN_UNIT, and of directions (values divided
             by the token's length), in units of DIRECTION_UNIT, each token's rounded down
    Values that are not finite count as 0 or as ± LIMIT.
    """
    on_gpu = tokens.is_cuda and importlib.util.find_spec("triton") is not None
    if on_gpu or os.environ.get("TRITON_INTERPRET") == "1":
        from dbsp_kernels.triton.pooling import sum_tokens_triton  # here: triton need not be installed

        return sum_tokens_triton(tokens, place, first, LIMIT, MEAN_UNIT, DIRECTION_UNIT)
    return sum_tokens_torch(tokens, place, first)


def sum_tokens_torch(
    tokens: torch.Tensor, place: torch.Tensor, first: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same by torch's own operations, some heads at a time."""
    batch, heads, _, width = tokens.shape
    blocks, count = len(first) - 1, len(place)
    block = torch.repeat_interleave(torch.arange(blocks, device=first.device), first.diff(), output_size=count)
    values, directions = tokens.new_zeros(2, batch, heads, blocks, width, dtype=torch.int64)
    step = max(1, CHUNK_BYTES // max(1, batch * count * width * 8))
    for head in range(0, heads, step):
        part = tokens[:, head : head + step].index_select(2, place).float()
        part = torch.nan_to_num(part, nan=0.0).clamp_(-LIMIT, LIMIT)
        values[:, head : head + step].index_add_(2, block, _fixed(part.double() / MEAN_UNIT))
        # In float64: torch's float32 root on CPU is not always the nearest; of this one's root, the rounded one is.
        length = halving_sum(part * part).double().sqrt_().float().unsqueeze(-1)
        part = torch.where(length > 0, part / length, torch.zeros_like(part))
        directions[:, head : head + step].index_add_(2, block, _fixed(part / DIRECTION_UNIT))
    return values, directions


def halving_sum(terms: torch.Tensor) -> torch.Tensor:
    """Σ over the last dimension in one fixed order: its halves are added until one is left. terms: [..., D]"""
    width = 1 << (terms.shape[-1] - 1).bit_length()
    terms = torch.nn.functional.pad(terms, (0, width - terms.shape[-1]))
    while width > 1:
        width //= 2
        terms = terms[..., :width] + terms[..., width:]
    return terms[..., 0]


def _fixed(values: torch.Tensor) -> torch.Tensor:
    """int64, rounded down: to add a half first would round twice, and not everywhere alike."""
    return values.floor_().long()
