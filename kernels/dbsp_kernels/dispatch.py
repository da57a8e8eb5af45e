"""Decides whether an operation on a tensor runs as a Triton kernel or as torch's own operations."""

from __future__ import annotations

import importlib.util
import os

import torch

__all__ = ["interpreted", "uses_triton"]


def uses_triton(tensor: torch.Tensor) -> bool:
    """Returns whether Triton kernels run on this tensor: on a GPU with Triton installed, or in the interpreter."""
    on_gpu = tensor.is_cuda and importlib.util.find_spec("triton") is not None
    return on_gpu or interpreted()


def interpreted() -> bool:
    """Returns whether Triton kernels run in Triton's interpreter, on the CPU: slow, but exact, and without a GPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"
