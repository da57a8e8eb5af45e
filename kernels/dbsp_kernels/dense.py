"""Dense attention with log-sum-exp on torch's own kernels (cuDNN's or FlashAttention), alone or in a packed one."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dbsp_kernels.merge import PartialAttention, lse_dtype

__all__ = ["DensePart", "attend_dense", "attend_dense_backward", "attend_dense_part", "dense_supported"]

HOPPER = (9, 0)
KEYS_AT_A_TIME = 4096
"""In a backward, so that scores of all keys need not be held at once."""


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


def attend_dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> PartialAttention:
    """Attention to all of some keys; autograd does not follow it.

    Args:
        q: [B, H, n, D].
        k, v: [B, H, m, D]; m may be 0.

    Returns:
        out [B, H, n, D] in q's dtype and lse [B, H, n], natural log, of `lse_dtype`.
    """
    wide = lse_dtype(q.dtype)
    if k.shape[2] == 0:
        return torch.zeros_like(q), q.new_full(q.shape[:3], -torch.inf, dtype=wide)
    if dense_supported(q):
        out, lse = _dense(q.contiguous(), k.contiguous(), v.contiguous(), scale)
        return out, lse.reshape(q.shape[:3]).to(wide)
    scores = (q.to(wide) @ k.to(wide).mT) * scale
    lse = scores.logsumexp(dim=-1)
    return ((scores - lse[..., None]).exp() @ v.to(wide)).to(q.dtype), lse


def attend_dense_backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    dout: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of an attention of which these keys are all, or a part.

    With out and log-sum-exp over *all* keys, P = exp(scale·QKᵀ − lse) is this part of the whole softmax, and the
    gradients of several parts add up: dV = Pᵀ·dO, dS = P ∘ (dO·Vᵀ − Σ dO∘O), dQ = scale·dS·K, dK = scale·dSᵀ·Q.

    Args:
        q, out, dout: [B, H, n, D].
        k, v: [B, H, m, D].
        lse: [B, H, n].

    Returns:
        dq, dk and dv, of `lse_dtype`.
    """
    wide = lse.dtype
    q, out, dout = q.to(wide), out.to(wide), dout.to(wide)
    delta = (dout * out).sum(dim=-1, keepdim=True)
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k, dtype=wide), torch.zeros_like(v, dtype=wide)
    for first in range(0, k.shape[2], KEYS_AT_A_TIME):
        part = slice(first, first + KEYS_AT_A_TIME)
        keys, values = k[:, :, part].to(wide), v[:, :, part].to(wide)
        weights = ((q @ keys.mT) * scale - lse[..., None]).exp()
        dscores = weights * (dout @ values.mT - delta) * scale
        dq += dscores @ keys
        dk[:, :, part] = dscores.mT @ q
        dv[:, :, part] = weights.mT @ dout
    return dq, dk, dv


def _dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> PartialAttention:
    """Attends with q [B, H, n, D] to k and v [B, H, m, D] on torch's kernel for the device."""
    aten = torch.ops.aten
    if not q.is_cuda:
        cpu: PartialAttention = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, False, scale=scale)[:2]
        return cpu
    if q.shape[-1] <= 128 and torch.cuda.get_device_capability(q.device) >= HOPPER:
        found = aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, False, False, scale=scale)
    else:
        found = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, False, False, scale=scale)
    return found[0], found[1]
