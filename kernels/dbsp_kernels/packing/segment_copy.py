"""Copying runs of tokens between tensors of any strides: how routes pack what they send and unpack what they get."""

from __future__ import annotations

import math

import torch

from dbsp_kernels.packing.segment_table import CopySegments

__all__ = ["CopySegments", "copy_segments"]

SLICED = 16  # tokens a run from which on the CPU copies run by run, rather than by index


def copy_segments(source: torch.Tensor, destination: torch.Tensor, runs: CopySegments) -> None:
    """Copies runs of tokens: one pass over what is copied, whatever the strides.

    source, destination: [B, heads, tokens, D] of one B, D, dtype and device; views are welcome
    Nothing else in the destination is touched.
    """
    if source.is_cuda:
        from dbsp_kernels.triton.segment_copy import triton_copy_segments  # here: triton need not be installed

        triton_copy_segments(source, destination, runs)
        return
    if runs.mean >= SLICED:
        for a, i, b, j, length, zeros in runs.entries:
            destination[:, b, j : j + length] = source[:, a, i : i + length]
            if zeros:
                destination[:, b, j + length : j + length + zeros] = 0
        return
    from_head, from_token, to_head, to_token, zero_head, zero_token = runs.places
    for one, other in zip(source, destination, strict=True):
        read, write = _token_matrix(one), _token_matrix(other)
        if read is None or write is None:
            other[to_head, to_token] = one[from_head, from_token]
        else:  # several times as fast as indexing by head and token
            (tokens, by_head, by_token), (places, to_by_head, to_by_token) = read, write
            values = tokens.index_select(0, from_head * by_head + from_token * by_token)
            places.index_copy_(0, to_head * to_by_head + to_token * to_by_token, values)
        if len(zero_head):
            other[zero_head, zero_token] = 0


def _token_matrix(t: torch.Tensor) -> tuple[torch.Tensor, int, int] | None:
    """A view [rows, D] of t [heads, tokens, D], and how many rows apart heads and tokens are; None without one."""
    heads, tokens, width = t.shape
    by_head, by_token = t.stride(0) if heads > 1 else 0, t.stride(1)
    step = math.gcd(by_head, by_token)
    if t.numel() == 0 or t.stride(2) != 1 or step < width:
        return None
    by_head, by_token = by_head // step, by_token // step
    rows = (heads - 1) * by_head + (tokens - 1) * by_token + 1
    return t.as_strided((rows, width), (step, 1)), by_head, by_token
