"""The reference kernel: plain torch in fp32 (fp64 for fp64 input), short enough to trust by reading."""

from __future__ import annotations

import torch

from dbsp_kernels.merge import lse_dtype

__all__ = ["reference_attention"]


def reference_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    kv_index: torch.Tensor,
    kv_count: torch.Tensor,
    kv_len: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The contract of `dbsp_kernels.block_attention`, one row at a time."""
    out = torch.zeros_like(q)
    wide = lse_dtype(q.dtype)
    lse = torch.full(q.shape[:2], -torch.inf, device=q.device, dtype=wide)
    for row, count in enumerate(kv_count.tolist()):
        if count == 0:
            continue
        blocks = kv_index[row, :count].long()
        keys = torch.cat([k[b, :n] for b, n in zip(blocks.tolist(), kv_len[blocks].tolist(), strict=True)]).to(wide)
        values = torch.cat([v[b, :n] for b, n in zip(blocks.tolist(), kv_len[blocks].tolist(), strict=True)]).to(wide)
        scores = q[row].to(wide) @ keys.T * scale
        lse[row] = torch.logsumexp(scores, dim=-1)
        out[row] = torch.softmax(scores, dim=-1) @ values
    return out, lse
