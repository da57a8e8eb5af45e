"""Sums of the tokens of blocks, the same bits however tokens are distributed: what block predictors pool from.

Floating-point sums depend on their order, and a block cut between ranks is summed in another order than one that is
not. So what is summed over tokens is summed as integers in fixed point, and sums over the D elements of a token are
taken pairwise in one fixed order, of which every step is an IEEE operation: CPU and GPU agree.
"""

from __future__ import annotations

import importlib.util
import itertools
import os

import torch

__all__ = ["pool_rows", "pool_rows_torch", "sum_tokens", "sum_tokens_torch", "with_triton"]

# The fixed point that every implementation of `sum_tokens` rounds to.
LIMIT = 2.0**15  # magnitudes beyond it count as it: no attention has such queries or keys
MEAN_UNIT = 2.0**-32  # with LIMIT, int64 holds the sum of 2**16 tokens
DIRECTION_UNIT = 2.0**-20

CHUNK_BYTES = 1 << 19  # of widened tokens at a time: 2.5 times as fast as 64 MiB, measured at D 64 on one core


def sum_tokens(tokens: torch.Tensor, place: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
    """Sums over the tokens of each block.

    tokens:  [B, H, n, D], float32, bfloat16 or float16, any strides
    place:   int64[m], which of the n are summed, block after block
    first:   int64[blocks + 1], where each block's begin in `place`, and where the last one's end
    returns: int64[H, B, blocks, 2 · D]: the sum of values, in units of MEAN_UNIT, and then of directions (values
             divided by the token's length), in units of DIRECTION_UNIT, each token's rounded down
    Values that are not finite count as 0 or as ± LIMIT.
    """
    if with_triton(tokens):
        from dbsp_kernels.triton.pooling import sum_tokens_triton  # here: triton need not be installed

        return sum_tokens_triton(tokens, place, first, LIMIT, MEAN_UNIT, DIRECTION_UNIT)
    return sum_tokens_torch(tokens, place, first)


def pool_rows(sums: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Means and similarities of complete blocks.

    sums:    int64[H, B, blocks, 2 · D], from `sum_tokens`;  lengths: int64[blocks], tokens of each
    returns: float32[H, B, blocks, D + 1]: the mean, and then the mean cosine of all pairs of the block's tokens

    The mean cosine of all pairs of n directions, each with itself included, is |Σ directions|² / n².
    """
    if with_triton(sums):
        from dbsp_kernels.triton.pooling import pool_rows_triton  # here: triton need not be installed

        return pool_rows_triton(sums, lengths, MEAN_UNIT, DIRECTION_UNIT)
    return pool_rows_torch(sums, lengths)


def pool_rows_torch(sums: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """The same by torch's own operations."""
    values, directions = sums.double().chunk(2, dim=-1)
    mean = values * MEAN_UNIT / lengths[:, None]
    direction = directions * DIRECTION_UNIT / lengths[:, None]
    return torch.cat([mean, halving_sum(direction * direction)[..., None]], dim=-1).float()


def with_triton(tensor: torch.Tensor) -> bool:
    """Whether Triton's kernels serve this tensor, on a GPU or in the interpreter."""
    on_gpu = tensor.is_cuda and importlib.util.find_spec("triton") is not None
    return on_gpu or os.environ.get("TRITON_INTERPRET") == "1"


def sum_tokens_torch(tokens: torch.Tensor, place: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
    """The same by torch's own operations, some heads at a time."""
    batch, heads, _, width = tokens.shape
    blocks, step = len(first) - 1, max(1, CHUNK_BYTES // (8 * width))
    sums = tokens.new_zeros(heads, batch, blocks, 2 * width, dtype=torch.int64)
    block = torch.repeat_interleave(torch.arange(blocks, device=first.device), first.diff(), output_size=len(place))
    # Some tokens of one head at a time: what is computed of them stays in the core's cache. Units are powers of 2, so
    # that to count in them is exact in float32.
    for item, head in itertools.product(range(batch), range(heads)):
        values, directions = sums[head, item].chunk(2, dim=-1)
        for places, number in zip(place.split(step), block.split(step), strict=True):
            part = tokens[item, head].index_select(0, places).float()
            part = torch.nan_to_num_(part, nan=0.0).clamp_(-LIMIT, LIMIT)
            values.index_add_(0, number, part.mul(1 / MEAN_UNIT).floor_().long())
            # In float64: torch's float32 root on CPU is not always the nearest; of this one's, the rounded one is.
            length = halving_sum(part * part).double().sqrt_().float()
            part.div_(length.masked_fill_(length == 0, torch.inf)[:, None])  # without a length: no direction
            # Rounded down: to add a half first would round twice, and not everywhere alike.
            directions.index_add_(0, number, part.mul_(1 / DIRECTION_UNIT).floor_().long())
    return sums


def halving_sum(terms: torch.Tensor) -> torch.Tensor:
    """Σ over the last dimension in one fixed order: its halves are added until one is left. terms: [..., D]"""
    width = 1 << (terms.shape[-1] - 1).bit_length()
    if width > terms.shape[-1]:
        terms = torch.nn.functional.pad(terms, (0, width - terms.shape[-1]))
    while width > 1:
        width //= 2
        terms = terms[..., :width] + terms[..., width:]
    return terms[..., 0]
