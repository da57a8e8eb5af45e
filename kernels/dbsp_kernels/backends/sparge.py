"""SpargeAttn's kernel (optional, `spas_sage_attn`): only whole heads, no log-sum-exp, 8 bits inside."""

from __future__ import annotations

import importlib.util

import torch

from dbsp_kernels.inputs import KernelInputs
from dbsp_kernels.merge import PartialAttention

__all__ = ["blocks", "sparge_attention", "why_unavailable"]


def why_unavailable() -> str | None:
    """Why this kernel cannot work here, or None."""
    if importlib.util.find_spec("spas_sage_attn") is None:
        return "spas_sage_attn is not installed; build it from https://github.com/thu-ml/SpargeAttn"
    return None


def blocks() -> frozenset[tuple[int, int]]:
    """Its (block_q, block_k) on the device at hand."""
    hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
    return frozenset({(64, 128) if hopper else (128, 64)})


def sparge_attention(inputs: KernelInputs) -> PartialAttention:
    """The contract of `dbsp_kernels.block_attention` for whole heads; lse is NaN, for there is none."""
    from spas_sage_attn import block_sparse_sage2_attn_cuda

    q, k, layout, kv_count = inputs.q, inputs.k, inputs.head_layout, inputs.kv_count
    if layout is None:
        raise ValueError("SpargeAttn's kernel needs a head_layout: it serves only whole heads")
    lse = torch.full(q.shape[:2], torch.nan, device=q.device, dtype=torch.float32)
    out = torch.zeros_like(q)
    if len(q) == 0 or len(k) == 0:
        return out, lse
    heads = [t.reshape(1, layout.heads, -1, t.shape[-1])[:, :, : layout.tokens].contiguous() for t in (q, k, inputs.v)]
    mask = _head_mask(inputs.kv_index, kv_count, layout.heads, len(k))
    result = block_sparse_sage2_attn_cuda(
        *heads, mask_id=mask, scale=inputs.scale, tensor_layout="HND", output_dtype=q.dtype
    )
    out.view(1, layout.heads, -1, q.shape[-1])[:, :, : layout.tokens] = result
    return out.masked_fill(kv_count[:, None, None] == 0, 0.0), lse  # rows without blocks: it leaves memory as it was


def _head_mask(kv_index: torch.Tensor, kv_count: torch.Tensor, heads: int, packed: int) -> torch.Tensor:
    """int8[1, heads, nq, nk] from the packed rows' lists."""
    rows, width = kv_index.shape
    own = packed // heads  # blocks of a head
    column = torch.arange(width, device=kv_index.device) < kv_count[:, None]
    block = torch.where(column, kv_index % own, own).long()  # entries beyond the count mark a column that is dropped
    mask = torch.zeros(rows, own + 1, dtype=torch.int8, device=kv_index.device)
    return mask.scatter_(1, block, 1)[:, :own].reshape(1, heads, -1, own).contiguous()
