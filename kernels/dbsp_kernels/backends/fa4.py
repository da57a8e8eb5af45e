"""FlashAttention-4's block-sparse forward (optional, `flash-attn-4`): FlashAttention-3's schedule on Hopper.

Packed rows are passed as one head of Rq·Bq queries over Ck·Bk keys, with a list of full blocks per row. (Zadouri et
al., FlashAttention-4, 2026; the Hopper kernels follow Shah et al., FlashAttention-3, 2024, section 3.)
"""

from __future__ import annotations

import importlib.metadata
from dataclasses import replace

import torch

from dbsp_kernels.errors import install_command
from dbsp_kernels.inputs import KernelInputs, PartialAttention, one_head
from dbsp_kernels.triton import launch

BLOCKS = {90: frozenset({(128, 128)}), 100: frozenset({(256, 128)}), 103: frozenset({(256, 128)})}
"""Supported (block_q, block_k) by architecture, 90 for Hopper.

On Blackwell, 100 needs rows of 256 queries (two tiles at a time), and 120 has no block sparsity.
"""


def why_unavailable() -> str | None:
    try:
        importlib.metadata.version("flash-attn-4")
    except importlib.metadata.PackageNotFoundError:
        return f"flash-attn-4 is not installed; {install_command('fa4')}"
    reason = launch.why_unavailable()
    return reason and f"kernel triton, which runs the short blocks, is unavailable: {reason}"


def fa4_attention(inputs: KernelInputs) -> PartialAttention:
    """Computes `dbsp_kernels.block_attention`, without merging.

    FlashAttention-4 runs the full blocks, our Triton kernel the few short ones. Without `kv_full`, or without rows or
    blocks, the Triton kernel runs everything.
    """
    from dbsp_kernels.triton.forward import triton_attention

    q, kv_full = inputs.q, inputs.kv_full
    if kv_full is None or 0 in (len(q), len(inputs.k), inputs.kv_index.shape[1]):
        return triton_attention(replace(inputs, partial=None, out_dtype=None))
    from flash_attn.cute import flash_attn_func
    from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch

    # 1. Full blocks: [Rq, Bq, D] → [1, Rq·Bq, 1, D]
    scaled, scale = inputs.positively_scaled()
    index, count = (t.reshape(1, 1, *t.shape).contiguous() for t in (inputs.kv_index, kv_full))
    blocks = BlockSparseTensorsTorch(
        mask_block_cnt=torch.zeros_like(count),  # no partly masked blocks
        mask_block_idx=index,
        full_block_cnt=count,
        full_block_idx=index,
        block_size=(q.shape[1], inputs.k.shape[1]),
    )
    heads = {name: one_head(t) for name, t in (("q", scaled), ("k", inputs.k), ("v", inputs.v))}
    with torch.cuda.device_of(q):  # flash_attn launches on the current device
        out, lse = flash_attn_func(**heads, softmax_scale=scale, block_sparse_tensors=blocks, return_lse=True)[:2]
    # 2. Short blocks
    partial = out.view(q.shape), lse.view(q.shape[:2])
    return triton_attention(replace(inputs, partial=partial, out_dtype=None), short_only=True)
