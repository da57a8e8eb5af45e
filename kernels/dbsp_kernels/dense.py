"""Dense parts of a packed attention, on torch's own dense kernels: cuDNN's or FlashAttention, with log-sum-exp."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dbsp_kernels.merge import PartialAttention

__all__ = ["DensePart", "attend_dense_part", "dense_supported"]

HOPPER = (9, 0)


@dataclass(frozen=True, eq=False)
class DensePart:
    """Packed rows side by side that attend to all of some packed blocks side by side.

    Attributes:
        rows, blocks: First and last, exclusive, in one copy of the batch.
        tokens: int64, the real tokens among the blocks' places; None: all of them.
    """

    rows: tuple[int, int]
    blocks: tuple[int, int]
    tokens: torch.Tensor | None


def dense_supported(q: torch.Tensor) -> bool:
    """Returns whether torch has a dense kernel that returns a log-sum-exp for q [..., D]."""
    if not q.is_cuda:
        return q.device.type == "cpu" and hasattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu")
    return q.dtype in (torch.float16, torch.bfloat16) and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256


def attend_dense_part(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, part: DensePart, scale: float
) -> PartialAttention:
    """Attention of one part.

    Args:
        q: [B, Rq, Bq, D].
        k, v: [B, Ck, Bk, D].

    Returns:
        out [B, rows, Bq, D] in q's dtype and lse [B, rows, Bq], natural log.
    """
    rows = q[:, slice(*part.rows)]
    keys, values = (t[:, slice(*part.blocks)].flatten(1, 2) for t in (k, v))
    if part.tokens is not None:
        keys, values = (t.index_select(1, part.tokens) for t in (keys, values))
    queries, keys, values = (t[:, None].contiguous() for t in (rows.flatten(1, 2), keys, values))
    out, lse = _dense(queries, keys, values, scale)
    return out.reshape(rows.shape), lse.reshape(rows.shape[:3])


def _dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> PartialAttention:
    """Attends with q [B, 1, n, D] to k and v [B, 1, m, D] on torch's kernel for the device."""
    aten = torch.ops.aten
    if not q.is_cuda:
        cpu: PartialAttention = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, False, scale=scale)[:2]
        return cpu
    if q.shape[-1] <= 128 and torch.cuda.get_device_capability(q.device) >= HOPPER:
        found = aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, False, False, scale=scale)
    else:
        found = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, False, False, scale=scale)
    return found[0], found[1]
