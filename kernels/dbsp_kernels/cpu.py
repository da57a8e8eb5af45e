"""The CPU kernel: rows of equal length are gathered and given to torch's own flash attention together."""

from __future__ import annotations

import torch

from dbsp_kernels.merge import lse_dtype

__all__ = ["cpu_attention", "missing"]

GATHER_BYTES = 64 << 20  # of keys gathered at a time: enough to keep the cores busy, little beside the model


def missing() -> str | None:
    """Why this kernel cannot work here, or None. The operator is private to torch, so its absence is not an error."""
    if hasattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu"):
        return None
    return "this torch has no flash attention for CPU; torch 2.6 to 2.13 have it"


def cpu_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    kv_index: torch.Tensor,
    kv_count: torch.Tensor,
    kv_len: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The contract of `dbsp_kernels.block_attention`."""
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()  # the operator reads D as if its stride were 1
    out = torch.zeros_like(q)
    lse = torch.full(q.shape[:2], -torch.inf, dtype=lse_dtype(q.dtype))
    block = k.shape[1]
    short = bool((kv_len < block).any())
    for count in kv_count.unique().tolist():
        if count == 0:  # the operator would give lse 0, not −inf
            continue
        rows = (kv_count == count).nonzero().squeeze(1)
        bytes_per_row = count * block * k.shape[2] * k.element_size()
        for chunk in rows.split(max(1, GATHER_BYTES // bytes_per_row)):
            blocks = kv_index[chunk, :count].long()
            bias = _tail_bias(kv_len[blocks], block, q.dtype) if short else None
            out[chunk], lse[chunk] = _flash(q[chunk], k[blocks], v[blocks], bias, scale)
    return out, lse


def _flash(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """q: [R, Bq, D]; k, v: [R, n, Bk, D]; bias: [R, 1, 1, n·Bk] or None. returns: out [R, Bq, D], lse [R, Bq]."""
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q[:, None], k.flatten(1, 2)[:, None], v.flatten(1, 2)[:, None], 0.0, False, attn_mask=bias, scale=scale
    )
    return out[:, 0], lse[:, 0]


def _tail_bias(lengths: torch.Tensor, block: int, dtype: torch.dtype) -> torch.Tensor:
    """−inf on the tokens beyond each block's length. lengths: int[R, n]; returns: [R, 1, 1, n·block]."""
    beyond = torch.arange(block) >= lengths[..., None]
    return torch.zeros(beyond.shape, dtype=dtype).masked_fill_(beyond, -torch.inf).flatten(1)[:, None, None]
