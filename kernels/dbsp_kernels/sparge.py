"""SpargeAttn's kernel (optional, `spas_sage_attn`): whole heads alone, no log-sum-exp, 8 bits inside."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

import torch

__all__ = ["DenseHeadLayout", "blocks", "missing", "sparge_attention"]


@dataclass(frozen=True)
class DenseHeadLayout:
    """What rows and KV blocks are when they are simply all those of some heads, in order.

    heads:  how many
    tokens: of each head; only its last query block and its last KV block may be short
    """

    heads: int
    tokens: int


def missing() -> str | None:
    """Why this kernel cannot work here, or None."""
    if importlib.util.find_spec("spas_sage_attn") is None:
        return "spas_sage_attn is not installed; build it from https://github.com/thu-ml/SpargeAttn"
    return None


def blocks() -> frozenset[tuple[int, int]]:
    """Its (block_q, block_k) on the device at hand."""
    hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
    return frozenset({(64, 128) if hopper else (128, 64)})


def sparge_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    kv_index: torch.Tensor,
    kv_count: torch.Tensor,
    kv_len: torch.Tensor,
    scale: float,
    *,
    whole: DenseHeadLayout,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The contract of `dbsp_kernels.block_attention` for whole heads; lse is NaN, for there is none."""
    from spas_sage_attn import block_sparse_sage2_attn_cuda

    lse = torch.full(q.shape[:2], torch.nan, device=q.device, dtype=torch.float32)
    out = torch.zeros_like(q)
    if len(q) == 0 or len(k) == 0:
        return out, lse
    heads = [t.reshape(1, whole.heads, -1, t.shape[-1])[:, :, : whole.tokens].contiguous() for t in (q, k, v)]
    mask = _head_mask(kv_index, kv_count, whole.heads, len(k))
    result = block_sparse_sage2_attn_cuda(*heads, mask_id=mask, scale=scale, tensor_layout="HND", output_dtype=q.dtype)
    out.view(1, whole.heads, -1, q.shape[-1])[:, :, : whole.tokens] = result
    return out.masked_fill(kv_count[:, None, None] == 0, 0.0), lse  # rows without blocks: it leaves memory as it was


def _head_mask(kv_index: torch.Tensor, kv_count: torch.Tensor, heads: int, packed: int) -> torch.Tensor:
    """int8[1, heads, nq, nk] from the packed rows' lists."""
    rows, width = kv_index.shape
    own = packed // heads  # blocks of a head
    column = torch.arange(width, device=kv_index.device) < kv_count[:, None]
    block = torch.where(column, kv_index % own, own).long()  # entries beyond the count mark a column that is dropped
    mask = torch.zeros(rows, own + 1, dtype=torch.int8, device=kv_index.device)
    return mask.scatter_(1, block, 1)[:, :own].reshape(1, heads, -1, own).contiguous()
