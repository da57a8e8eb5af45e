"""Launches of Triton kernels on the device of their tensors, which need not be the current device."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["launch"]


def launch(kernel: Any, grid: tuple[int, ...], first: torch.Tensor, *arguments: Any, **options: Any) -> None:
    """Launches a kernel on the device of its first argument.

    Triton launches on the current device, with the current device's compiled code. On another device the kernel would
    read memory that it cannot reach.

    Args:
        kernel: A function decorated with `triton.jit`.
        grid: Number of programs per axis.
        first: The kernel's first argument; all other tensors are on its device.
        arguments, options: The kernel's other arguments, and Triton's options.
    """
    if not first.is_cuda:  # in the interpreter
        kernel[grid](first, *arguments, **options)
        return
    with torch.cuda.device(first.device):
        kernel[grid](first, *arguments, **options)
