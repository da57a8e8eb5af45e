"""FastVideo's block-sparse attention (optional, `fastvideo-kernel`): 64×64 on Hopper, to compare with."""

from __future__ import annotations

import importlib
import importlib.util

import torch

from dbsp_kernels.advice import install_command
from dbsp_kernels.inputs import KernelInputs
from dbsp_kernels.kernel import Kernel
from dbsp_kernels.merge import PartialAttention

__all__ = ["ARCHS", "BLOCKS", "KERNEL", "fastvideo_attention", "why_unavailable"]

ARCHS = frozenset({90})
BLOCKS = frozenset({(64, 64)})


def why_unavailable() -> str | None:
    """Why this kernel cannot work here, or None."""
    if importlib.util.find_spec("fastvideo_kernel") is None:
        return f"fastvideo-kernel is not installed; {install_command('fastvideo')}"
    try:
        operators = importlib.import_module("fastvideo_kernel._C").fastvideo_kernel_ops
    except (ImportError, AttributeError) as error:
        return f"fastvideo-kernel's compiled module cannot be loaded ({error}); its wheel fits one torch version only"
    return None if hasattr(operators, "block_sparse_fwd") else "this fastvideo-kernel has no block_sparse_fwd"


def fastvideo_attention(inputs: KernelInputs) -> PartialAttention:
    """The contract of `dbsp_kernels.block_attention`, without merging."""
    q, kv_count = inputs.q, inputs.kv_count
    if len(q) == 0 or len(inputs.k) == 0 or inputs.kv_index.shape[1] == 0:
        return torch.zeros_like(q), torch.full(q.shape[:2], -torch.inf, device=q.device, dtype=torch.float32)
    operators = importlib.import_module("fastvideo_kernel._C").fastvideo_kernel_ops
    width, own_scale = q.shape[-1], q.shape[-1] ** -0.5
    q = q if inputs.scale == own_scale else q * (inputs.scale / own_scale)  # its scale is fixed
    empty = kv_count[:, None] == 0  # it always takes a block: such rows take the first, and are masked after
    index = inputs.kv_index.masked_fill(empty, 0).contiguous()
    one_head = (t.reshape(1, 1, -1, width).contiguous() for t in (q, inputs.k, inputs.v))
    out, scaled = operators.block_sparse_fwd(
        *one_head, index[None, None], kv_count.clamp(min=1)[None, None], inputs.kv_len.contiguous()
    )
    lse = scaled.view(q.shape[:2]) / -(width**0.5)
    return out.view(q.shape).masked_fill(empty[..., None], 0.0), lse.masked_fill(empty, -torch.inf)


KERNEL = Kernel(
    name="fastvideo",
    run=fastvideo_attention,
    devices=frozenset({"cuda"}),
    dtypes=frozenset({torch.bfloat16}),
    archs=ARCHS,
    blocks=lambda *_: BLOCKS,
    widths=frozenset({64, 128}),
    why_unavailable=why_unavailable,
    by_name_only=True,
)
