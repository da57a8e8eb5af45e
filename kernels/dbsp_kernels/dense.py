"""Dense rows of a packed attention, on the fused kernel that torch chooses, with log-sum-exp."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn.attention import SDPBackend

from dbsp_kernels.inputs import PartialAttention
from dbsp_kernels.kernel import HALVES

Operator = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], PartialAttention]
"""Takes q [B, H, n, D], k and v [B, H, m, D] and the scale; returns out and log-sum-exp [B, H, n]."""

aten = torch.ops.aten
_log = logging.getLogger("dbsp.kernels")


@dataclass(frozen=True, eq=False)
class DensePart:
    """Packed rows side by side that attend to all of some packed blocks side by side.

    Attributes:
        rows, blocks: First and last, exclusive, in one copy of the batch.
        tokens: int64, the real tokens among the blocks' slots; None: all of them.
    """

    rows: tuple[int, int]
    blocks: tuple[int, int]
    tokens: torch.Tensor | None


def fused_kernel(q: torch.Tensor) -> str | None:
    """Returns the name of torch's fused kernel for dense rows of q [..., D], or None: the block kernel runs them.

    Ranks may differ in it: results differ by rounding only.
    """
    head_dim = q.shape[-1]
    if not q.is_cuda or q.dtype not in HALVES or head_dim % 8 or head_dim > 256:
        return None
    found = _operator(q.device, q.dtype, head_dim)
    return found and found[0]


def attend_dense_part(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, part: DensePart, scale: float
) -> PartialAttention:
    """Computes attention of one part on `fused_kernel`, which must exist.

    Args:
        q: [B, Rq, Bq, D].
        k, v: [B, Ck, Bk, D].

    Returns:
        out [B, rows, Bq, D] in q's dtype and lse [B, rows, Bq], natural log.
    """
    found = _operator(q.device, q.dtype, q.shape[-1])
    if found is None:
        raise ValueError(f"torch has no fused kernel for {q.dtype} and head dim {q.shape[-1]} on {q.device}")
    rows = q[:, slice(*part.rows)]
    keys, values = (t[:, slice(*part.blocks)].flatten(1, 2) for t in (k, v))
    if part.tokens is not None:
        keys, values = (t.index_select(1, part.tokens) for t in (keys, values))
    queries, keys, values = (t[:, None].contiguous() for t in (rows.flatten(1, 2), keys, values))
    _, operator = found
    out, lse = operator(queries, keys, values, scale)
    return out.reshape(rows.shape), lse.reshape(rows.shape[:3])


@functools.cache
def _operator(device: torch.device, dtype: torch.dtype, head_dim: int) -> tuple[str, Operator] | None:
    """Returns the name and operator that torch chooses, once it has run on a block of zeros, or None."""
    q = torch.zeros(1, 1, 64, head_dim, device=device, dtype=dtype)
    try:
        chosen = _FUSED.get(torch._fused_sdp_choice(q, q, q, None, 0.0, False, scale=1.0))
        if chosen is not None:
            name, run = chosen
            run(q, q, q, 1.0)
            return name, run
        reason = "torch chooses no fused kernel that returns a log-sum-exp"
    except _NOT_OURS:
        raise
    except RuntimeError as error:  # an operator that this build of torch or this GPU lacks
        reason = " ".join(str(error).split())[:200]
    _log.warning("dense heads run on the block kernel (%s, head dim %d): %s", dtype, head_dim, reason)
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
    """Runs cuDNN, which compiles a graph per shape, with queries padded to one of few numbers."""
    queries = q.shape[2]
    padding = _graph_queries(queries, k.shape[2]) - queries
    q = torch.nn.functional.pad(q, (0, 0, 0, padding)) if padding else q
    out, lse, *_ = aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, False, False, scale=scale)
    return out[:, :, :queries], lse.reshape(q.shape[:3])[:, :, :queries]


def _graph_queries(queries: int, keys: int) -> int:
    """Returns the number of queries of the cuDNN graph: as many as keys, or one of 16 sizes per power of two."""
    if queries == keys:  # a whole head
        return queries
    step = max(64, 1 << max(0, queries.bit_length() - 5))
    return -(-queries // step) * step


_FUSED: dict[int, tuple[str, Operator]] = {
    SDPBackend.FLASH_ATTENTION.value: ("flash", _flash),
    SDPBackend.EFFICIENT_ATTENTION.value: ("efficient", _efficient),
    SDPBackend.CUDNN_ATTENTION.value: ("cudnn", _cudnn),
}
"""Names and operators by torch's choice."""
