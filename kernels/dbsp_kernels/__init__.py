"""Attention on packed blocks. `block_attention` is the contract, `available` says which kernels work here."""

from dbsp_kernels.merge import merge_states
from dbsp_kernels.registry import KERNELS, Kernel, available, block_attention, choose_kernel

__all__ = ["KERNELS", "Kernel", "available", "block_attention", "choose_kernel", "merge_states"]
