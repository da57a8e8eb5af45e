"""Modulation by sequence: each token is scaled by its sequence's row, of which no copy for every token is kept."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

__all__ = ["modulated", "scaled"]


def scaled(x: torch.Tensor, rows: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Each token times a row: x · rows[ids].

    Autograd keeps x, the few rows and the index, where it would keep rows[ids], as large as x (KnapFormer, A.1).

    Args:
        x: float[1, n, C], tokens.
        rows: float[R, C], R a few.
        ids: int64[n], each token's row.
    """
    product: torch.Tensor = _Scaled.apply(x, rows, ids)
    return product


def modulated(x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """x · (1 + scale) + shift of each token's row; scale and shift are float[R, C], else as `scaled`."""
    return scaled(x, 1 + scale, ids) + shift.index_select(0, ids)


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, rows: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, rows, ids)
        return x * rows.index_select(0, ids)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, rows, ids = ctx.saved_tensors
        of_x = (gradient * rows.index_select(0, ids)).to(x.dtype) if ctx.needs_input_grad[0] else None
        of_rows = None
        if ctx.needs_input_grad[1]:
            of_rows = torch.zeros_like(rows).index_add_(0, ids, (gradient * x)[0].to(rows.dtype))
        return of_x, of_rows, None
