"""Merging partial attention results by their log-sum-exp."""

from __future__ import annotations

import torch

from dbsp_kernels.dispatch import uses_triton

__all__ = ["PartialAttention", "lse_dtype", "merge_into", "merge_states"]

PartialAttention = tuple[torch.Tensor, torch.Tensor]
"""A result over some of the keys: out [..., D] and lse [...], natural log; where it saw no key, 0 and −inf."""


def lse_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the log-sum-exp's dtype for queries of `dtype`: float32, or float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


def merge_states(
    out: torch.Tensor, lse: torch.Tensor, out_part: torch.Tensor, lse_part: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over the union of two disjoint key sets.

    out = out·σ(lse − lse_part) + out_part·σ(lse_part − lse) is the usual update; where both sides are −inf the
    difference is NaN, so the weights are formed against a finite maximum instead.

    Args:
        out, out_part: [..., D].
        lse, lse_part: [...], natural log, of `lse_dtype`; a side that saw no key has lse −inf and out 0.

    Returns:
        (out in out's dtype, lse).
    """
    top = torch.maximum(lse, lse_part)
    finite_top = torch.where(torch.isneginf(top), torch.zeros_like(top), top)
    weight, weight_part = torch.exp(lse - finite_top), torch.exp(lse_part - finite_top)
    total = weight + weight_part
    share = weight / torch.where(total == 0, torch.ones_like(total), total)
    share_part = weight_part / torch.where(total == 0, torch.ones_like(total), total)
    merged = out * share[..., None] + out_part * share_part[..., None]
    return merged.to(out.dtype), finite_top + torch.log(total)


def merge_into(out: torch.Tensor, lse: torch.Tensor, out_part: torch.Tensor, lse_part: torch.Tensor) -> None:
    """`merge_states` that writes the result over `out` and `lse`: on CUDA in one pass over memory.

    Args:
        out: [..., D], a view whose items (along the first dimension) are contiguous, such as some rows of each.
        lse: [...], likewise.
        out_part, lse_part: As for `merge_states`.
    """
    if uses_triton(out) and lse.dtype == torch.float32 and _contiguous_items(out) and _contiguous_items(lse):
        from dbsp_kernels.triton.merge import triton_merge_into  # here: triton need not be installed

        triton_merge_into(out, lse, out_part.contiguous(), lse_part.contiguous())
        return
    merged, merged_lse = merge_states(out, lse, out_part, lse_part)
    out.copy_(merged)
    lse.copy_(merged_lse)


def _contiguous_items(t: torch.Tensor) -> bool:
    """Returns whether t[i] is contiguous for each i."""
    return len(t) == 0 or t[0].is_contiguous()
