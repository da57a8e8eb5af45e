"""The table of kernels, and the choice among them."""

from __future__ import annotations

import os

import torch

from dbsp_kernels.backends import cpu, fa4, reference, sparge, triton
from dbsp_kernels.errors import UserError
from dbsp_kernels.kernel import Kernel, KernelRequirements

__all__ = [
    "KERNELS",
    "available",
    "choose_kernel",
    "explain_auto",
    "require_kernel_name",
    "require_supported",
    "returns_lse",
]

KERNELS: dict[str, Kernel] = {
    kernel.name: kernel for kernel in (cpu.KERNEL, triton.KERNEL, reference.KERNEL, fa4.KERNEL, sparge.KERNEL)
}
"""Kernels by name, in order of preference."""

REMOVED = dict.fromkeys(("flex", "cudnn", "fastvideo"), "triton")
"""Names of kernels that older versions had, with the kernel to use instead."""

LONGEST_SHOWN = 80
"""Characters of an unknown name that a message shows."""


def available(
    device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32, needs: KernelRequirements | None = None
) -> list[str]:
    """Names of the kernels that can serve tensors of `dtype` on `device` here, best first."""
    return [name for name, kernel in KERNELS.items() if kernel.why_unsupported(device, dtype, needs) is None]


def require_kernel_name(name: str, source: str = "kernel") -> None:
    """Raises UserError, with the names to use instead, unless `name` is "auto" or a kernel's; `source` set it."""
    if name in REMOVED:
        raise UserError(f"{source} {name!r} has been removed from db-SP; use {REMOVED[name]}")
    if name != "auto" and name not in KERNELS:
        shown = name if len(name) <= LONGEST_SHOWN else f"{name[:LONGEST_SHOWN]}…"
        raise UserError(f"unknown {source} {shown!r}; use one of auto, {', '.join(KERNELS)}")


def _wanted(name: str) -> str:
    """Returns `name`, or for "auto" $DBSP_KERNEL if set. Raises UserError if no kernel has that name."""
    from_environment = os.environ.get("DBSP_KERNEL") if name == "auto" else None
    require_kernel_name(from_environment or name, "DBSP_KERNEL" if from_environment else "kernel")
    return from_environment or name


def choose_kernel(
    name: str, device: torch.device | str, dtype: torch.dtype, needs: KernelRequirements | None = None
) -> Kernel:
    """Returns the kernel called `name`; for "auto" $DBSP_KERNEL if set, else the first that `auto` may take here.

    Raises:
        UserError: The kernel is unknown or does not support `dtype`, `device` or `needs`; the message names a fix.
    """
    wanted = _wanted(name)
    candidates = _candidates(device) if wanted == "auto" else [KERNELS[wanted]]
    reasons = {}
    for kernel in candidates:
        reason = kernel.why_unsupported(device, dtype, needs)
        if reason is None:
            return kernel
        reasons[kernel.name] = reason
    instead = " or ".join(available(device, dtype, needs)) or "another dtype"
    if wanted == "auto":
        found = "; ".join(f"{name}: {reason}" for name, reason in reasons.items()) or "none runs on this device"
        raise UserError(f"kernel auto finds no kernel for {dtype} on {device} ({found}); use {instead}")
    raise UserError(f"kernel {wanted!r} cannot be used here: {reasons[wanted]}; use {instead}")


def _candidates(device: torch.device | str) -> list[Kernel]:
    """Returns the kernels that "auto" may choose on such a device, best first."""
    return [kernel for kernel in KERNELS.values() if torch.device(device).type in kernel.auto_on]


def require_supported(name: str, needs: KernelRequirements) -> None:
    """Raises UserError, naming kernels that can, when the kernel called `name` can serve such a plan on no machine.

    Nothing that differs between ranks matters, so that all of them raise alike.
    """
    wanted = _wanted(name)
    reason = None if wanted == "auto" else KERNELS[wanted].why_unsupported_anywhere(needs)
    if reason is not None:
        instead = " or ".join(k.name for k in KERNELS.values() if k.why_unsupported_anywhere(needs) is None)
        raise UserError(f"kernel {wanted!r} cannot serve this plan: {reason}; use {instead}")


def explain_auto(device: torch.device | str, dtype: torch.dtype, needs: KernelRequirements | None = None) -> str:
    """Returns one sentence with the kernel that "auto" takes for `dtype` on `device` here, and why."""
    chosen = choose_kernel("auto", device, dtype, needs)
    if os.environ.get("DBSP_KERNEL"):
        return f"{chosen.name}, because DBSP_KERNEL={os.environ['DBSP_KERNEL']}"
    candidates = _candidates(device)
    passed = [f"{k.name}: {k.why_unsupported(device, dtype, needs)}" for k in candidates[: candidates.index(chosen)]]
    return f"{chosen.name}, the first that supports {dtype} on {device}" + (
        f" ({'; '.join(passed)})" if passed else ""
    )


def returns_lse(kernel: str) -> bool:
    """Returns whether a kernel has the log-sum-exp that rings merge by; "auto" does. Raises UserError if unknown."""
    wanted = _wanted(kernel)
    return wanted == "auto" or KERNELS[wanted].returns_lse
