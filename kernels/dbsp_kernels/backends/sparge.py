"""SpargeAttn's 8-bit kernel (optional, `spas_sage_attn`): whole heads only, without log-sum-exp."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
from collections.abc import Iterator

import torch

from dbsp_kernels.errors import install_command, page
from dbsp_kernels.inputs import KernelInputs, PartialAttention

BLOCKS = dict.fromkeys((80, 86, 87, 89), frozenset({(128, 64)})) | {90: frozenset({(64, 128)})}
"""Supported (block_q, block_k) by architecture, 90 for Hopper."""

_OF_HOPPER = "qk_int8_sv_f8_accum_f32_block_sparse_attn_inst_buf_fuse_v_scale_with_pv_threshold_sm90"


def why_unavailable() -> str | None:
    """Returns why this kernel is unavailable, or None; a build may lack the compiled module or this GPU's kernels."""
    if importlib.util.find_spec("spas_sage_attn") is None:
        build = install_command("sparge").replace("install", "install --no-build-isolation", 1)
        return f"spas_sage_attn is not installed and not on PyPI; build it with {build} ({page('kernels')})"
    try:
        kernels = importlib.import_module("spas_sage_attn._qattn")
    except ImportError as error:
        return f"spas_sage_attn's compiled module cannot be loaded ({error}); build it for this torch"
    if torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0) and not hasattr(kernels, _OF_HOPPER):
        return "spas_sage_attn was built without its kernels for Hopper; build it with TORCH_CUDA_ARCH_LIST=9.0"
    return None


def sparge_attention(inputs: KernelInputs) -> PartialAttention:
    """Computes `dbsp_kernels.block_attention` for whole heads; lse is NaN."""
    from spas_sage_attn import block_sparse_sage2_attn_cuda

    q, k, tokens, kv_count = inputs.q, inputs.k, inputs.head_tokens, inputs.kv_count
    if tokens is None:
        raise ValueError("kernel sparge supports only whole heads; pass head_tokens")
    lse = torch.full(q.shape[:2], torch.nan, device=q.device, dtype=torch.float32)
    out = torch.zeros_like(q)
    if len(q) == 0 or len(k) == 0:
        return out, lse
    q, scale = inputs.positively_scaled()
    count = len(q) // -(-tokens // q.shape[1])
    heads = [t.reshape(1, count, -1, t.shape[-1])[:, :, :tokens].contiguous() for t in (q, k, inputs.v)]
    # Rows' lists → int8[1, heads, nq, nk]; entries beyond a row's count go to an extra column, dropped below
    per_head = len(k) // count
    listed = torch.arange(inputs.kv_index.shape[1], device=q.device) < kv_count[:, None]
    block = torch.where(listed, inputs.kv_index % per_head, per_head).long()
    mask = torch.zeros(len(q), per_head + 1, dtype=torch.int8, device=q.device).scatter_(1, block, 1)
    mask = mask[:, :per_head].reshape(1, count, -1, per_head).contiguous()
    with _default_stream(q.device):
        result = block_sparse_sage2_attn_cuda(
            *heads, mask_id=mask, scale=scale, tensor_layout="HND", output_dtype=q.dtype
        )
    out.view(1, count, -1, q.shape[-1])[:, :, :tokens] = result
    return out.masked_fill(kv_count[:, None, None] == 0, 0.0), lse  # rows without blocks are not written


@contextlib.contextmanager
def _default_stream(device: torch.device) -> Iterator[None]:
    """Runs the body on the device's default stream, where SpargeAttn always launches, ordered with the current stream.

    Restores the current device, which SpargeAttn changes.
    """
    if device.type != "cuda":
        yield
        return
    with torch.cuda.device(device):
        current, default = torch.cuda.current_stream(device), torch.cuda.default_stream(device)
        default.wait_stream(current)
        with torch.cuda.stream(default):
            yield
        current.wait_stream(default)
