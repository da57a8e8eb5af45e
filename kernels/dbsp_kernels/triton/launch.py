"""Checks that Triton kernels are available, and launches them on their tensors' device.

Triton is optional, so it is imported only to read its version.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from typing import Any

import torch

LEAST_TRITON = (3, 5)
"""3.4 prefetches twice as many tiles, too many for Hopper's shared memory; 3.3 has no tensor descriptors."""


def interpreted() -> bool:
    """Returns True if kernels run in Triton's interpreter on the CPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@functools.cache
def triton_version() -> tuple[int, int] | None:
    """Returns the first two numbers of the installed Triton's version, or None without one."""
    if importlib.util.find_spec("triton") is None:
        return None
    import triton  # slow to import

    major, minor = triton.__version__.split(".")[:2]
    return int(major), int(minor)


def why_unavailable() -> str | None:
    """Returns why Triton kernels cannot run here, or None."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed; run `pip install triton`"
    if not torch.cuda.is_available() and not interpreted():
        return "no GPU found; set TRITON_INTERPRET=1 to run on the CPU"
    if torch.cuda.is_available() and torch.version.cuda and torch.cuda.get_device_capability() < (8, 0):
        return "it needs a GPU of compute capability 8.0 (Ampere) or newer"
    version = triton_version()
    if version is not None and version < LEAST_TRITON:
        major, minor = version
        return f"Triton {major}.{minor} is older than 3.5; install torch 2.9 or newer, which brings a newer Triton"
    return None


def capability_of(device: torch.device) -> int:
    """Returns a GPU's compute capability as one number: 90 for Hopper."""
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def launch(kernel: Any, grid: tuple[int, ...], first: torch.Tensor, *arguments: Any, **options: Any) -> None:
    """Launches a kernel on the device of its first argument.

    Triton itself launches on the current device, which may not be able to access the tensors.
    """
    if not first.is_cuda or first.device.index == torch.cuda.current_device():  # CPU: interpreter
        kernel[grid](first, *arguments, **options)
        return
    with torch.cuda.device(first.device):
        kernel[grid](first, *arguments, **options)
