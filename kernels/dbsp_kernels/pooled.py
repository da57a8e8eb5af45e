"""Attention of packed rows to pooled keys, one for each block that a row skips: torch's own operations."""

from __future__ import annotations

import torch

from dbsp_kernels.merge import PartialAttention, lse_dtype

__all__ = ["attend_pooled"]

AT_ONCE = 1 << 24
"""Scores that are held at a time: 64 MiB of float32, and their weights as much."""


def attend_pooled(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor, scale: float
) -> PartialAttention:
    """Attention of the rows of one head to keys that are the same for all of them.

    Args:
        q: [B, R, Bq, D].
        k, v: [B, n, D], of any dtype.
        bias: [R, n], added to a row's scores; −inf where it does not attend.

    Returns:
        out [B, R, Bq, D] and lse [B, R, Bq], natural log, of `lse_dtype`; 0 and −inf in rows that attend to nothing.
    """
    wide = lse_dtype(q.dtype)
    (batch, rows, block, _), n = q.shape, k.shape[1]
    k, v, bias = (t.to(wide) for t in (k, v, bias))
    out, lse = q.new_empty(q.shape, dtype=wide), q.new_empty(q.shape[:3], dtype=wide)
    step = max(1, AT_ONCE // max(1, batch * block * n))
    for first in range(0, rows, step):
        some = slice(first, first + step)
        # 1. Scores of some rows, [B, rows · Bq, n] as [B, rows, Bq, n].
        scores = torch.matmul(q[:, some].to(wide).flatten(1, 2), k.mT).unflatten(1, (-1, block))
        scores.mul_(scale).add_(bias[some, None])
        # 2. Their log-sum-exp, against a finite number where a row has nothing to attend to.
        lse[:, some] = torch.logsumexp(scores, dim=-1)
        against = lse[:, some].masked_fill(torch.isneginf(lse[:, some]), 0.0)
        # 3. The output.
        weights = scores.sub_(against[..., None]).exp_()
        out[:, some] = torch.matmul(weights.flatten(1, 2), v).unflatten(1, (-1, block))
    return out, lse
