"""Dense rows of a packed attention, computed by torch's fused kernels with log-sum-exp."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.backends.cuda import (
    SDPAParams,
    can_use_cudnn_attention,
    can_use_efficient_attention,
    can_use_flash_attention,
)
from torch.nn.attention import SDPBackend, sdpa_kernel

from dbsp_kernels.inputs import PartialAttention
from dbsp_kernels.kernel import HALVES

Operator = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], PartialAttention]
"""Takes q [B, H, n, D], k and v [B, H, m, D] and the scale; returns out and log-sum-exp [B, H, n]."""

aten = torch.ops.aten
_log = logging.getLogger("dbsp.kernels")


@dataclass(frozen=True, eq=False)
class DensePart:
    """Packed rows of equally sized heads (or their sequences) that attend to all blocks of their head.

    The heads are evenly spaced, so that one strided view covers all of them.
    """

    row_starts: range  # first row of each head, within one batch element
    rows: int  # per head
    block_starts: range  # first block of each head, within one batch element
    blocks: int  # per head
    tokens: torch.Tensor | None  # int64, positions of real tokens in a head's blocks; None: all are real

    def rows_of(self, t: torch.Tensor) -> torch.Tensor:
        """Returns the rows of t [B, Rq, ...] as a view [B, heads, rows, ...]."""
        return _of_heads(t, self.row_starts, self.rows)

    def blocks_of(self, t: torch.Tensor) -> torch.Tensor:
        """Returns the blocks of t [B, Ck, ...] as a view [B, heads, blocks, ...]."""
        return _of_heads(t, self.block_starts, self.blocks)


def _of_heads(t: torch.Tensor, starts: range, count: int) -> torch.Tensor:
    return t[:, starts[0] : starts[-1] + count].unfold(1, count, starts.step).movedim(-1, 2)


def fused_kernel(q: torch.Tensor) -> str | None:
    """Returns the name of torch's fused kernel for dense rows of q [..., D], or None if the block kernel runs them.

    Chosen once per process, device, dtype and D, independent of `sdpa_kernel` and torch's other attention settings.
    Ranks may choose different kernels; results then differ by rounding only.
    """
    head_dim = q.shape[-1]
    if not q.is_cuda or q.dtype not in HALVES or head_dim % 8 or head_dim > 256:
        return None
    chosen = _chosen(q.device, q.dtype, head_dim)
    return chosen and chosen.name


def attend_dense_part(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, part: DensePart, scale: float
) -> PartialAttention:
    """Computes attention of all heads of one part in one call of `fused_kernel`, which must not be None.

    q [B, Rq, Bq, D], k and v [B, Ck, Bk, D] → out [B, heads, rows, Bq, D] in q's dtype and lse [B, heads, rows, Bq].
    """
    chosen = _chosen(q.device, q.dtype, q.shape[-1])
    if chosen is None:
        raise ValueError(f"torch has no fused kernel for {q.dtype} and head dim {q.shape[-1]} on {q.device}")
    rows = part.rows_of(q)
    queries = rows.flatten(2, 3)  # [B, heads, rows · Bq, D], a view
    keys, values = (part.blocks_of(t).flatten(2, 3) for t in (k, v))  # [B, heads, blocks · Bk, D], views
    if part.tokens is not None:
        keys, values = (t.index_select(2, part.tokens) for t in (keys, values))
    out, lse = chosen.run(queries, keys, values, scale)
    return out.reshape(rows.shape), lse.reshape(rows.shape[:4])


class FusedKernel(NamedTuple):
    name: str  # shown in reports
    supports: Callable[[SDPAParams], bool]  # torch's check of inputs
    run: Operator


@functools.cache
def _chosen(device: torch.device, dtype: torch.dtype, head_dim: int) -> FusedKernel | None:
    """Returns the first preferred kernel that torch supports and that runs on zeros, or None."""
    q = torch.zeros(1, 1, 64, head_dim, device=device, dtype=dtype)
    inputs = SDPAParams(q, q, q, None, 0.0, False, False)
    reasons = []
    with sdpa_kernel(list(SDPBackend.__members__.values())):  # ignore the caller's context
        for kernel in _PREFERRED.get(torch.cuda.get_device_capability(device), (FLASH, EFFICIENT)):
            try:
                if kernel.supports(inputs):
                    kernel.run(q, q, q, 1.0)
                    return kernel
                reasons.append(f"{kernel.name}: torch does not support it here")
            except _NOT_OURS:
                raise
            except RuntimeError as error:  # this torch build or GPU lacks the operator
                reasons.append(f"{kernel.name}: {' '.join(str(error).split())[:200]}")
    _log.warning("dense heads run on the block kernel (%s, head dim %d): %s", dtype, head_dim, "; ".join(reasons))
    return None


_NOT_OURS = (torch.OutOfMemoryError, getattr(torch, "AcceleratorError", torch.OutOfMemoryError))
"""Errors that choosing another kernel cannot avoid."""


def _flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> PartialAttention:
    out, lse, *_ = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, False, False, scale=scale)
    return out, lse


def _efficient(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> PartialAttention:
    out, lse, *_ = aten._scaled_dot_product_efficient_attention(q, k, v, None, True, scale=scale)
    return out, lse[..., : q.shape[2]]  # lse is padded


def _cudnn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> PartialAttention:
    """Runs cuDNN on queries padded to few distinct lengths, since cuDNN compiles a graph per shape and strides."""
    queries, keys = q.shape[2], k.shape[2]
    if len(q) == 1:  # normalize the batch stride, which changes with the plan
        q, k, v = (t[0][None] for t in (q, k, v))
    step = max(64, 1 << max(0, queries.bit_length() - 5))
    if queries != keys and queries % step:  # part of a head: pad to one of 16 sizes per power of two
        q = torch.nn.functional.pad(q, (0, 0, 0, -queries % step))
    out, lse, *_ = aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, False, False, scale=scale)
    return out[:, :, :queries], lse.reshape(q.shape[:3])[:, :, :queries]


def _supports_cudnn(inputs: SDPAParams) -> bool:
    """Returns False up to cuDNN 9.15, like torch: wrong at lengths not divisible by 128 (pytorch/pytorch#169849)."""
    return (torch.backends.cudnn.version() or 0) > 91500 and can_use_cudnn_attention(inputs)


CUDNN = FusedKernel("cudnn", _supports_cudnn, _cudnn)
FLASH = FusedKernel("flash", can_use_flash_attention, _flash)
EFFICIENT = FusedKernel("efficient", can_use_efficient_attention, _efficient)
_PREFERRED = {
    (9, 0): (CUDNN,),  # torch's FlashAttention-2 is slower on Hopper than the block kernel
    (10, 0): (CUDNN, FLASH, EFFICIENT),
    (10, 3): (CUDNN, FLASH, EFFICIENT),
}
"""Fused kernels faster than the block kernel by compute capability, fastest first; elsewhere torch's order."""
