"""Attention on packed blocks: `block_attention`, `block_attention_backward` and the table of kernels."""

from dbsp_kernels.attention import block_attention, block_attention_backward, checks_values
from dbsp_kernels.dense import DensePart, attend_dense_part, fused_kernel
from dbsp_kernels.inputs import BackwardInputs, Gradients, KernelInputs, PartialAttention, merge_into, merge_states
from dbsp_kernels.kernel import KERNELS, Kernel, KernelRequirements, available, choose_kernel, require_supported

__all__ = [
    "KERNELS",
    "BackwardInputs",
    "DensePart",
    "Gradients",
    "Kernel",
    "KernelInputs",
    "KernelRequirements",
    "PartialAttention",
    "attend_dense_part",
    "available",
    "block_attention",
    "block_attention_backward",
    "checks_values",
    "choose_kernel",
    "fused_kernel",
    "merge_into",
    "merge_states",
    "require_supported",
]
