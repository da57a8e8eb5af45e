"""cuDNN's block-sparse attention (optional, `nvidia-cudnn-frontend`): NVIDIA's kernels for Hopper and Blackwell.

Packed rows are one head of Rq·Bq queries over Ck·Bk keys to it, with a list of blocks for each row.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from typing import Any

import torch

from dbsp_kernels.advice import install_command
from dbsp_kernels.backward import BackwardInputs, Gradients
from dbsp_kernels.inputs import KernelInputs
from dbsp_kernels.kernel import HALVES, Kernel
from dbsp_kernels.merge import PartialAttention

__all__ = [
    "ARCHS",
    "KERNEL",
    "backward_arguments",
    "blocks",
    "cudnn_attention",
    "cudnn_attention_backward",
    "forward_arguments",
    "why_no_backward",
    "why_unavailable",
]

ARCHS = frozenset({90, 100, 103, 110, 120, 121})
LEAST_VERSION = (1, 32)
_BOTH = frozenset({(64, 64), (128, 128)})


def why_unavailable() -> str | None:
    """Why this kernel cannot work here, or None."""
    install = install_command("cudnn")
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
    """The (block_q, block_k) it serves on an architecture, for q of `dtype` with heads of `width`; None: unknown."""
    family = None if arch is None else arch // 10
    widths = {128} if family == 12 else {64, 96, 128}
    if width is not None and width not in widths:
        return frozenset()
    if family in (10, 11) and (dtype != torch.bfloat16 or width not in (None, 128)):
        return frozenset({(128, 128)})
    return _BOTH


def cudnn_attention(inputs: KernelInputs) -> PartialAttention:
    """The contract of `dbsp_kernels.block_attention`, without merging.

    Where rows say how many full blocks they begin with, cuDNN runs those, and our kernel the few short ones: given the
    lengths of blocks, cuDNN would mask every step (128×128).
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


def cudnn_attention_backward(inputs: BackwardInputs) -> Gradients:
    """The contract of `dbsp_kernels.block_attention_backward`; the sums of one call are in bfloat16."""
    from cudnn import block_sparse_attention

    given = inputs.forward
    result = block_sparse_attention.block_sparse_attention_backward(**_aligned(backward_arguments(inputs)))
    dq, dk, dv = (
        result[f"d{name}_tensor"].view(like.shape).float()
        for name, like in (("q", given.q), ("k", given.k), ("v", given.v))
    )
    return dq.masked_fill(given.kv_count[:, None, None] == 0, 0.0), dk, dv


def why_no_backward(arch: int | None, dtype: torch.dtype, width: int | None) -> str | None:
    """Returns why there is no backward for q of `dtype` with heads of `width` on an architecture, or None."""
    if dtype != torch.bfloat16:
        return f"its backward takes torch.bfloat16, the tensors are {dtype}"
    if arch is not None and arch // 10 not in (9, 10):
        return "its backward serves GPUs of compute capability 9.0 and 10.0"
    if width not in (None, 128):
        return f"its backward serves head dims of 128, not {width}"
    return None


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


def backward_arguments(inputs: BackwardInputs) -> dict[str, Any]:
    """What `block_sparse_attention_backward` is called with: all blocks, with their lengths."""
    given = inputs.forward
    return {
        "do_tensor": _one_head(inputs.dout),
        "q_tensor": _one_head(given.q),
        "k_tensor": _one_head(given.k),
        "v_tensor": _one_head(given.v),
        "o_tensor": _one_head(inputs.out),
        "lse_tensor": inputs.lse.reshape(1, 1, -1),
        "q2k_block_index": given.kv_index.reshape(1, 1, *given.kv_index.shape).contiguous(),
        "q2k_block_nums": given.kv_count.reshape(1, 1, -1).contiguous(),
        "block_sizes": given.kv_len.contiguous(),
        "sparse_block_size": given.q.shape[1],
        "softmax_scale": given.scale,
    }


def _one_head(t: torch.Tensor) -> torch.Tensor:
    """[n, B, D] → [1, 1, n·B, D]"""
    return t.reshape(1, 1, -1, t.shape[-1]).contiguous()


def _aligned(arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments with tensors that begin at multiples of 128 bytes, as cuDNN's copies require."""
    return {
        name: value.clone() if isinstance(value, torch.Tensor) and value.data_ptr() % 128 else value
        for name, value in arguments.items()
    }


KERNEL = Kernel(
    name="cudnn",
    run=cudnn_attention,
    backward=cudnn_attention_backward,
    why_no_backward=why_no_backward,
    devices=frozenset({"cuda"}),
    dtypes=HALVES,
    archs=ARCHS,
    blocks=blocks,
    widths=frozenset({64, 96, 128}),
    why_unavailable=why_unavailable,
    by_name_only=True,
)
