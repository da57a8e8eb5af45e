"""Attention on packed blocks. `block_attention` is the contract, `available` says which kernels work here."""

from dbsp_kernels.attention import block_attention
from dbsp_kernels.merge import PartialAttention, merge_into, merge_states
from dbsp_kernels.registry import (
    KERNELS,
    Kernel,
    KernelRequirements,
    available,
    choose_kernel,
    explain_auto,
    require_fit,
)
from dbsp_kernels.sparge import DenseHeadLayout

__all__ = [
    "KERNELS",
    "DenseHeadLayout",
    "Kernel",
    "KernelRequirements",
    "PartialAttention",
    "available",
    "block_attention",
    "choose_kernel",
    "explain_auto",
    "merge_into",
    "merge_states",
    "require_fit",
]
