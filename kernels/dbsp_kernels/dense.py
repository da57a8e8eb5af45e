"""Dense rows of a packed attention, on one of torch's fused kernels, with log-sum-exp."""

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
    """Packed rows of heads (or of their sequences) of equal size, each of which attends to all blocks of its head.

    The heads follow one another at equal distance, so that all of them are one view.

    Attributes:
        row_starts, block_starts: The first row and the first block of each head, in one copy of the batch.
        rows, blocks: How many rows and blocks each head has.
        tokens: int64, the real tokens among the slots of a head's blocks; None: all of them.
    """

    row_starts: range
    rows: int
    block_starts: range
    blocks: int
    tokens: torch.Tensor | None

    def rows_of(self, t: torch.Tensor) -> torch.Tensor:
        """Returns the rows of t [B, Rq, ...] as a view [B, heads, rows, ...]."""
        return _of_heads(t, self.row_starts, self.rows)

    def blocks_of(self, t: torch.Tensor) -> torch.Tensor:
        """Returns the blocks of t [B, Ck, ...] as a view [B, heads, blocks, ...]."""
        return _of_heads(t, self.block_starts, self.blocks)


def _of_heads(t: torch.Tensor, starts: range, count: int) -> torch.Tensor:
    return t[:, starts[0] : starts[-1] + count].unfold(1, count, starts.step).movedim(-1, 2)


def fused_kernel(q: torch.Tensor) -> str | None:
    """Returns the name of torch's fused kernel for dense rows of q [..., D], or None: the block kernel runs them.

    It is chosen once per process, device, dtype and D. The caller's `sdpa_kernel` context plays no role, nor do other
    settings of what torch's own attention may use. Ranks may differ in it: results differ by rounding only.
    """
    head_dim = q.shape[-1]
    if not q.is_cuda or q.dtype not in HALVES or head_dim % 8 or head_dim > 256:
        return None
    chosen = _chosen(q.device, q.dtype, head_dim)
    return chosen and chosen.name


def attend_dense_part(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, part: DensePart, scale: float
) -> PartialAttention:
    """Computes attention of one part on `fused_kernel`, which must exist, in one call for all of its heads.

    Args:
        q: [B, Rq, Bq, D].
        k, v: [B, Ck, Bk, D].

    Returns:
        out [B, heads, rows, Bq, D] in q's dtype and lse [B, heads, rows, Bq], natural log.
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
    """One of torch's fused kernels."""

    name: str  # As reports name it
    supports: Callable[[SDPAParams], bool]  # Torch's own check of inputs
    run: Operator  # Runs it


@functools.cache
def _chosen(device: torch.device, dtype: torch.dtype, head_dim: int) -> FusedKernel | None:
    """Returns the first preferred kernel that torch supports and that runs on a block of zeros, or None."""
    q = torch.zeros(1, 1, 64, head_dim, device=device, dtype=dtype)
    inputs = SDPAParams(q, q, q, None, 0.0, False, False)
    reasons = []
    with sdpa_kernel(list(SDPBackend.__members__.values())):  # independent of the caller's context
        for kernel in _PREFERRED.get(torch.cuda.get_device_capability(device), (FLASH, EFFICIENT)):
            try:
                if kernel.supports(inputs):
                    kernel.run(q, q, q, 1.0)
                    return kernel
                reasons.append(f"{kernel.name}: torch does not support it here")
            except _NOT_OURS:
                raise
            except RuntimeError as error:  # an operator that this build of torch or this GPU lacks
                reasons.append(f"{kernel.name}: {' '.join(str(error).split())[:200]}")
    _log.warning("dense heads run on the block kernel (%s, head dim %d): %s", dtype, head_dim, "; ".join(reasons))
    return None


_NOT_OURS = (torch.OutOfMemoryError, getattr(torch, "AcceleratorError", torch.OutOfMemoryError))
"""Errors that another kernel cannot avoid."""


def _flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> PartialAttention:
    out, lse, *_ = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, False, False, scale=scale)
    return out, lse


def _efficient(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> PartialAttention:
    out, lse, *_ = aten._scaled_dot_product_efficient_attention(q, k, v, None, True, scale=scale)
    return out, lse[..., : q.shape[2]]  # its log-sum-exp is padded


def _cudnn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> PartialAttention:
    """Runs cuDNN, which compiles a graph per shape and strides, with queries padded to one of few numbers."""
    queries, keys = q.shape[2], k.shape[2]
    if len(q) == 1:  # strides of the batch would be those of all packed rows and blocks, which change with the plan
        q, k, v = (t[0][None] for t in (q, k, v))
    step = max(64, 1 << max(0, queries.bit_length() - 5))
    if queries != keys and queries % step:  # not a whole head: one of 16 sizes per power of two
        q = torch.nn.functional.pad(q, (0, 0, 0, -queries % step))
    out, lse, *_ = aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, False, False, scale=scale)
    return out[:, :, :queries], lse.reshape(q.shape[:3])[:, :, :queries]


def _supports_cudnn(inputs: SDPAParams) -> bool:
    """Returns False for cuDNN up to 9.15 too, as torch's own choice does: it has faults at lengths that are not
    multiples of 128 (pytorch/pytorch#169849)."""
    return (torch.backends.cudnn.version() or 0) > 91500 and can_use_cudnn_attention(inputs)


CUDNN = FusedKernel("cudnn", _supports_cudnn, _cudnn)
FLASH = FusedKernel("flash", can_use_flash_attention, _flash)
EFFICIENT = FusedKernel("efficient", can_use_efficient_attention, _efficient)
_PREFERRED = {
    (9, 0): (CUDNN,),  # torch's FlashAttention-2 is slower on Hopper than the block kernel
    (10, 0): (CUDNN, FLASH, EFFICIENT),
    (10, 3): (CUDNN, FLASH, EFFICIENT),
}
"""Fused kernels that are faster than the block kernel, the fastest first, by compute capability; everywhere else
torch's own order, in which cuDNN comes after all others."""
