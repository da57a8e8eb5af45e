"""FlashInfer's block-sparse forward for Blackwell (optional, `flashinfer-python`), which masks short blocks itself.

Packed rows are one head of Rq·Bq queries over Ck·Bk keys to it, with a list of blocks and their number for each row,
and each block's tokens. Its log-sum-exp is natural here; that of FlashInfer's other kernels is base 2. (Ye et al.,
FlashInfer, 2025.)
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

On Hopper and older GPUs FlashInfer plans block sparsity on the host, and waits for the device to do so.
"""

_FORWARD = {
    128: "flashinfer.cute_dsl.sparse.bsa_attn_sm100_blk128:bsa_attn_sm100_blk128_fwd",
    64: "flashinfer.cute_dsl.sparse.bsa_attn_sm120:bsa_attn_sm120_blk64_fwd",
}
"""Functions by the queries of a row: for Blackwell's data centre GPUs, and its others."""

QUACK = "pip install --no-deps quack-kernels==0.6.4"
"""The version that FlashInfer asks for, without what it requires, which is older than what FlashInfer does."""


def why_unavailable() -> str | None:
    """Returns why this kernel cannot work here, or None."""
    spec = importlib.util.find_spec("flashinfer")
    if spec is None or spec.origin is None:
        return f"flashinfer-python is not installed; {install_command('flashinfer')}"
    if not Path(spec.origin).with_name("cute_dsl").joinpath("sparse/bsa_attn_sm120.py").exists():
        return f"this flashinfer-python has no block-sparse attention with counts; {install_command('flashinfer')}"
    datacentre = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 10
    if datacentre and importlib.util.find_spec("quack") is None:
        return f"quack-kernels, which FlashInfer imports there, is not installed; run `{QUACK}` ({page('kernels')})"
    return None


def flashinfer_attention(inputs: KernelInputs) -> PartialAttention:
    """Computes `dbsp_kernels.block_attention`, without merging."""
    q, count = inputs.q, inputs.kv_count
    if 0 in (len(q), len(inputs.k), inputs.kv_index.shape[1]):
        return torch.zeros_like(q), q.new_full(q.shape[:2], -torch.inf, dtype=lse_dtype(q.dtype))
    # 1. What lies beyond a block's tokens gets a weight of 0, which a NaN there would outlive.
    token = torch.arange(inputs.v.shape[1], device=q.device)
    v = inputs.v.masked_fill((token >= inputs.kv_len[:, None])[..., None], 0.0)
    # 2. All rows as one head.
    scaled, scale = inputs.positively_scaled()
    with torch.cuda.device_of(q):  # it launches on the current device
        out, lse = pkgutil.resolve_name(_FORWARD[q.shape[1]])(
            *(one_head(t) for t in (scaled, inputs.k, v)),
            q2k_block_index=inputs.kv_index[None, None].contiguous(),
            q2k_block_nums=count[None, None].contiguous(),
            block_sparse_num=1,  # not read where there are counts
            block_sizes=inputs.kv_len,
            softmax_scale=scale,
            return_lse=True,
        )
    # 3. Rows without blocks: it scales by 0 what memory held before.
    empty = (count == 0)[:, None]
    out = out.view(q.shape).masked_fill(empty[..., None], 0.0)
    return out, lse.view(q.shape[:2]).masked_fill(empty, -torch.inf)
