"""FlashInfer's block-sparse forward for Blackwell (optional, `flashinfer-python`), which also masks short blocks.

Packed rows are passed as one head of Rq·Bq queries over Ck·Bk keys, with each row's list and number of blocks and each
block's number of tokens. This kernel's log-sum-exp is natural; FlashInfer's others use base 2. (Ye et al., FlashInfer,
2025.)
"""

from __future__ import annotations

import importlib.util
import pkgutil
from pathlib import Path

import torch

from dbsp_kernels.errors import install_command, page
from dbsp_kernels.inputs import KernelInputs, PartialAttention, lse_dtype, one_head

BLOCKS = dict.fromkeys((100, 103), frozenset({(128, 128)})) | dict.fromkeys((120, 121), frozenset({(64, 64)}))
"""Supported (block_q, block_k) by architecture.

On Hopper and older GPUs FlashInfer plans block sparsity on the host, which synchronizes with the device.
"""

_FORWARD = {
    128: "flashinfer.cute_dsl.sparse.bsa_attn_sm100_blk128:bsa_attn_sm100_blk128_fwd",
    64: "flashinfer.cute_dsl.sparse.bsa_attn_sm120:bsa_attn_sm120_blk64_fwd",
}
"""Functions by block_q: 128 on Blackwell data-center GPUs, 64 on other Blackwell GPUs."""

QUACK = "pip install --no-deps quack-kernels==0.6.4"
"""The version that FlashInfer requires; --no-deps since its own requirements are older than FlashInfer's."""


def why_unavailable() -> str | None:
    spec = importlib.util.find_spec("flashinfer")
    if spec is None or spec.origin is None:
        return f"flashinfer-python is not installed; {install_command('flashinfer')}"
    if not Path(spec.origin).with_name("cute_dsl").joinpath("sparse/bsa_attn_sm120.py").exists():
        return f"this flashinfer-python has no block-sparse attention with counts; {install_command('flashinfer')}"
    datacentre = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 10
    if datacentre and importlib.util.find_spec("quack") is None:
        return f"quack-kernels, which FlashInfer imports here, is not installed; run `{QUACK}` ({page('kernels')})"
    return None


def flashinfer_attention(inputs: KernelInputs) -> PartialAttention:
    """Computes `dbsp_kernels.block_attention`, without merging."""
    q, count = inputs.q, inputs.kv_count
    if 0 in (len(q), len(inputs.k), inputs.kv_index.shape[1]):
        return torch.zeros_like(q), q.new_full(q.shape[:2], -torch.inf, dtype=lse_dtype(q.dtype))
    # 1. Zero values beyond each block's length: weights there are 0, but 0 · NaN is NaN
    token = torch.arange(inputs.v.shape[1], device=q.device)
    v = inputs.v.masked_fill((token >= inputs.kv_len[:, None])[..., None], 0.0)
    # 2. All rows as one head: [Rq, Bq, D] → [1, Rq·Bq, 1, D]
    scaled, scale = inputs.positively_scaled()
    with torch.cuda.device_of(q):  # FlashInfer launches on the current device
        out, lse = pkgutil.resolve_name(_FORWARD[q.shape[1]])(
            *(one_head(t) for t in (scaled, inputs.k, v)),
            q2k_block_index=inputs.kv_index[None, None].contiguous(),
            q2k_block_nums=count[None, None].contiguous(),
            block_sparse_num=1,  # ignored when counts are passed
            block_sizes=inputs.kv_len,
            softmax_scale=scale,
            return_lse=True,
        )
    # 3. Clear rows without blocks, where FlashInfer multiplies uninitialized memory by 0
    empty = (count == 0)[:, None]
    out = out.view(q.shape).masked_fill(empty[..., None], 0.0)
    return out, lse.view(q.shape[:2]).masked_fill(empty, -torch.inf)
