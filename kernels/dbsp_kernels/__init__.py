"""Attention on packed blocks. `block_attention` is the contract, `available` says which kernels work here."""

from dbsp_kernels.attention import block_attention
from dbsp_kernels.inputs import DenseHeadLayout, KernelInputs
from dbsp_kernels.merge import PartialAttention, merge_into, merge_states
from dbsp_kernels.registry import (
    KERNELS,
    Kernel,
    KernelRequirements,
    available,
    choose_kernel,
    explain_auto,
    require_supported,
)

__all__ = [
    "KERNELS",
    "DenseHeadLayout",
    "Kernel",
    "KernelInputs",
    "KernelRequirements",
    "PartialAttention",
    "available",
    "block_attention",
    "choose_kernel",
    "explain_auto",
    "merge_into",
    "merge_states",
    "require_supported",
]
