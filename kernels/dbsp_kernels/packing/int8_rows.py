"""Tokens as int8 with a scale each: rounded while they are packed into a send buffer, and restored at their owner.

A token of D numbers becomes a row of 32-bit words: its D numbers as int8, four a word, and behind them the scale's
float32. Scale and numbers follow from the token alone, and from what is subtracted from all of them. Every step is an
IEEE operation, so that bits are the same wherever a token is rounded, on CPU and GPU.
"""

from __future__ import annotations

import torch

from dbsp_kernels.dispatch import uses_triton
from dbsp_kernels.packing.segment_copy import CopySegments, put_tokens, take_tokens

__all__ = ["LARGEST", "TINY", "quantise_segments", "restore_rows", "row_words", "rows_of_tokens"]

LARGEST = 127.0
TINY = 2.0**-100
"""A token whose largest magnitude is below it is all zeros: its scale could be subnormal, which GPUs may flush."""


def row_words(width: int) -> int:
    """Words of a token of so many numbers, its scale included."""
    return -(-width // 4) + 1


def quantise_segments(
    source: torch.Tensor, destination: torch.Tensor, segments: CopySegments, less: torch.Tensor | None = None
) -> None:
    """`copy_segments` from tokens to rows of int8: number / scale, to the nearest, halves to even.

    A token's scale is its largest magnitude / 127. One with a number that is not finite gets scale NaN.

    Args:
        source: [B, heads, tokens, D], floating-point, any strides.
        destination: int32[B, heads, tokens, row_words(D)]; views with words side by side are welcome.
        segments: Without zeros.
        less: float32[B, source's heads, D], what is subtracted from every token beforehand. None: nothing.
    """
    if uses_triton(source):
        from dbsp_kernels.triton.int8_rows import triton_quantise_segments  # here: triton need not be installed

        triton_quantise_segments(source, destination, segments.table, segments.mean, less)
        return
    from_head, from_token, to_head, to_token, *_ = segments.places
    for item, (one, other) in enumerate(zip(source, destination, strict=True)):
        values = take_tokens(one, from_head, from_token).to(torch.float32)
        if less is not None:
            values = values - less[item].index_select(0, from_head)
        put_tokens(other, to_head, to_token, rows_of_tokens(values))


def rows_of_tokens(tokens: torch.Tensor) -> torch.Tensor:
    """int32[..., row_words(D)] from float32[..., D], by torch's own operations."""
    width, largest = tokens.shape[-1], tokens.abs().amax(dim=-1)  # NaN where one is
    scale = largest / LARGEST
    scale = torch.where(largest.isfinite(), scale, torch.nan).masked_fill_(largest < TINY, 0.0)
    divisor = torch.where(scale > 0, scale, torch.inf)
    rows = tokens.new_zeros(*tokens.shape[:-1], row_words(width), dtype=torch.int32)
    rows.view(torch.int8)[..., :width] = (tokens / divisor[..., None]).round_().nan_to_num_(0.0)
    rows.view(torch.float32)[..., -1] = scale
    return rows


def restore_rows(rows: torch.Tensor, width: int, dtype: torch.dtype) -> torch.Tensor:
    """Tokens [..., D] of a floating-point dtype from contiguous rows int32[..., row_words(D)]: number · scale."""
    if uses_triton(rows):
        from dbsp_kernels.triton.int8_rows import triton_restore_rows  # here: triton need not be installed

        return triton_restore_rows(rows, width, dtype)
    numbers = rows.view(torch.int8)[..., :width].to(torch.float32)
    return numbers.mul_(rows.view(torch.float32)[..., -1:]).to(dtype)
