"""cuDNN's block-sparse attention (optional, `nvidia-cudnn-frontend`): NVIDIA's kernels for Hopper and Blackwell.

Packed rows are one head of Rq·Bq queries over Ck·Bk keys, with a list of blocks for each row: its contract is ours.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from typing import Any

import torch

from dbsp_kernels.inputs import KernelInputs
from dbsp_kernels.merge import PartialAttention

__all__ = ["ARCHS", "blocks", "cudnn_attention", "cudnn_backward", "forward_arguments", "why_unavailable"]

ARCHS = frozenset({90, 100, 103, 110, 120, 121})
LEAST_VERSION = (1, 32)
_BOTH = frozenset({(64, 64), (128, 128)})


def why_unavailable() -> str | None:
    """Why this kernel cannot work here, or None."""
    install = "pip install 'dbsp-attention[cudnn]'"
    try:
        version = importlib.metadata.version("nvidia-cudnn-frontend")
    except importlib.metadata.PackageNotFoundError:
        return f"nvidia-cudnn-frontend is not installed; {install}"
    if tuple(int(part) for part in version.split(".")[:2]) < LEAST_VERSION:
        return f"nvidia-cudnn-frontend {version} has no block-sparse attention for Hopper, 1.32 has it; {install}"
    if importlib.util.find_spec("cutlass") is None:
        return f"nvidia-cutlass-dsl, in which cuDNN's kernels are written, is not installed; {install}"
    return None


def blocks(arch: int | None, dtype: torch.dtype, width: int | None) -> frozenset[tuple[int, int]]:
    """The (block_q, block_k) it serves on an architecture, for q of `dtype` with heads of `width`; None: any."""
    family = None if arch is None else arch // 10
    widths = {128} if family == 12 else {64, 96, 128}
    if width is not None and width not in widths:
        return frozenset()
    if family in (10, 11) and (dtype != torch.bfloat16 or width not in (None, 128)):
        return frozenset({(128, 128)})
    return _BOTH


def cudnn_attention(inputs: KernelInputs) -> PartialAttention:
    """The contract of `dbsp_kernels.block_attention`, without merging.

    Where rows say how many full blocks they begin with, it runs those, and our kernel the few short ones: told the
    lengths of blocks, it would mask every step (128×128).
    """
    from cudnn import block_sparse_attention

    q, kv_full = inputs.q, inputs.kv_full
    if len(q) == 0 or len(inputs.k) == 0 or inputs.kv_index.shape[1] == 0:
        return torch.zeros_like(q), torch.full(q.shape[:2], -torch.inf, device=q.device, dtype=torch.float32)
    result = block_sparse_attention.block_sparse_attention_forward(**_aligned(forward_arguments(inputs)))
    partial = result["o_tensor"].view(q.shape), result["lse_tensor"].view(q.shape[:2])
    if kv_full is None:
        return partial
    from dbsp_kernels.triton.forward import triton_attention

    return triton_attention(inputs.merged_into(partial), short_only=True)


def cudnn_backward(
    inputs: KernelInputs, out: torch.Tensor, lse: torch.Tensor, grad_out: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of a sum weighted by `grad_out`, by cuDNN: bfloat16, sm90 and sm100; on sm90 D 128.

    inputs:   of the forward, or of one period of a ring
    out, lse: of the whole attention, all periods merged: [Rq, Bq, D], float32[Rq, Bq]
    grad_out: [Rq, Bq, D]
    returns:  gradients of q, k and v, of their shapes; those of k and v from these rows alone
    """
    from cudnn import block_sparse_attention

    arguments = backward_arguments(inputs, out, lse, grad_out)
    result = block_sparse_attention.block_sparse_attention_backward(**_aligned(arguments))
    grad_q, grad_k, grad_v = (
        result[f"d{name}_tensor"].view(like.shape)
        for name, like in (("q", inputs.q), ("k", inputs.k), ("v", inputs.v))
    )
    return grad_q.masked_fill(inputs.kv_count[:, None, None] == 0, 0.0), grad_k, grad_v


def forward_arguments(inputs: KernelInputs) -> dict[str, Any]:
    """What `block_sparse_attention_forward` is called with: the full blocks if rows begin with them, else all."""
    q, scale = inputs.positively_scaled()
    count = inputs.kv_count if inputs.kv_full is None else inputs.kv_full
    return {
        "q_tensor": _one_head(q),
        "k_tensor": _one_head(inputs.k),
        "v_tensor": _one_head(inputs.v),
        "q2k_block_index": inputs.kv_index.reshape(1, 1, *inputs.kv_index.shape).contiguous(),
        "q2k_block_nums": count.reshape(1, 1, -1).contiguous(),
        "block_sizes": inputs.kv_len.contiguous() if inputs.kv_full is None else None,
        "sparse_block_size": q.shape[1],
        "allow_empty_block_nums": True,
        "softmax_scale": scale,
    }


def backward_arguments(
    inputs: KernelInputs, out: torch.Tensor, lse: torch.Tensor, grad_out: torch.Tensor
) -> dict[str, Any]:
    """What `block_sparse_attention_backward` is called with: all blocks, with their lengths."""
    return {
        "do_tensor": _one_head(grad_out),
        "q_tensor": _one_head(inputs.q),
        "k_tensor": _one_head(inputs.k),
        "v_tensor": _one_head(inputs.v),
        "o_tensor": _one_head(out),
        "lse_tensor": lse.reshape(1, 1, -1),
        "q2k_block_index": inputs.kv_index.reshape(1, 1, *inputs.kv_index.shape).contiguous(),
        "q2k_block_nums": inputs.kv_count.reshape(1, 1, -1).contiguous(),
        "block_sizes": inputs.kv_len.contiguous(),
        "sparse_block_size": inputs.q.shape[1],
        "softmax_scale": inputs.scale,
    }


def _one_head(t: torch.Tensor) -> torch.Tensor:
    """[n, B, D] → [1, 1, n·B, D]"""
    return t.reshape(1, 1, -1, t.shape[-1]).contiguous()


def _aligned(arguments: dict[str, Any]) -> dict[str, Any]:
    """The same with tensors that begin at multiples of 128 bytes, as its copies want."""
    return {
        name: value.clone() if isinstance(value, torch.Tensor) and value.data_ptr() % 128 else value
        for name, value in arguments.items()
    }
