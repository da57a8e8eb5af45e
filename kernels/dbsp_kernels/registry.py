"""Which kernels there are, and which one serves."""

from __future__ import annotations

import os

import torch

from dbsp_kernels.backends import cpu, cudnn, fa4, fastvideo, flex, reference, sparge, triton
from dbsp_kernels.errors import UserError
from dbsp_kernels.kernel import Kernel, KernelRequirements, arch_of

__all__ = [
    "KERNELS",
    "available",
    "choose_kernel",
    "explain_auto",
    "faster_than_auto",
    "require_supported",
    "returns_lse",
]

KERNELS: dict[str, Kernel] = {
    kernel.name: kernel
    for kernel in (
        cpu.KERNEL,
        fa4.KERNEL,
        triton.KERNEL,
        flex.KERNEL,
        reference.KERNEL,
        sparge.KERNEL,
        cudnn.KERNEL,
        fastvideo.KERNEL,
    )
}
"""Kernels by name, in the order in which "auto" prefers them. Taken only by name: sparge, which quantises, and those
that no GPU has yet shown to be right and faster."""


def available(
    device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32, needs: KernelRequirements | None = None
) -> list[str]:
    """Names of the kernels that can serve tensors of `dtype` on `device` here, best first."""
    return [name for name, kernel in KERNELS.items() if kernel.why_unsupported(device, dtype, needs) is None]


def _wanted(name: str) -> str:
    """The kernel asked for: "auto" is $DBSP_KERNEL if set. Raises UserError for an unknown one."""
    wanted = (os.environ.get("DBSP_KERNEL") or "auto") if name == "auto" else name
    if wanted != "auto" and wanted not in KERNELS:
        raise UserError(f"unknown kernel {wanted!r}; use auto or one of {', '.join(KERNELS)}")
    return wanted


def choose_kernel(
    name: str, device: torch.device | str, dtype: torch.dtype, needs: KernelRequirements | None = None
) -> Kernel:
    """The kernel called `name`; "auto" is $DBSP_KERNEL if set, else the best that can serve `dtype` on `device`.

    Raises UserError, naming one that can, when the kernel is unknown or cannot serve.
    """
    wanted = _wanted(name)
    if wanted != "auto":
        reason = KERNELS[wanted].why_unsupported(device, dtype, needs)
        if reason is None:
            return KERNELS[wanted]
        instead = " or ".join(available(device, dtype, needs)) or "another dtype"
        raise UserError(f"kernel {wanted!r} cannot be used here: {reason}; use {instead}")
    for kernel in KERNELS.values():
        if not kernel.by_name_only and kernel.why_unsupported(device, dtype, needs) is None:
            return kernel
    raise UserError(f"no attention kernel serves {dtype} on {device}; use float32, float16 or bfloat16")


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
    """What "auto" takes for `dtype` on `device` here, and why, in one sentence."""
    name = choose_kernel("auto", device, dtype, needs).name
    if os.environ.get("DBSP_KERNEL"):
        return f"{name}, because DBSP_KERNEL={os.environ['DBSP_KERNEL']}"
    better = [n for n in list(KERNELS)[: list(KERNELS).index(name)] if device in KERNELS[n].devices]
    passed = [f"{other}: {KERNELS[other].why_unsupported(device, dtype, needs)}" for other in better]
    return f"{name}, the best that serves {dtype} on {device}" + (f" ({'; '.join(passed)})" if passed else "")


_NOT_THROUGH_TENSOR_MEMORY = "triton's output goes through tensor memory at every step (read from machine code)"
_FASTER = {
    (90, (128, 128)): ("fa4", "1.00 of the tensor cores' time against triton's 0.70, modelled"),
    (90, (64, 64)): ("cudnn", "0.89 of the tensor cores' time against triton's 0.80, modelled"),
} | {(arch, blocks): ("cudnn", _NOT_THROUGH_TENSOR_MEMORY) for arch in (100, 103) for blocks in ((64, 64), (128, 128))}
"""By architecture and blocks the kernel that should be faster than triton there, and why. Not timed on a GPU by us."""


def faster_than_auto(device: torch.device | str, dtype: torch.dtype, blocks: tuple[int, int]) -> str | None:
    """Which kernel should be faster here than what "auto" takes for such blocks, why, and how to have it; or None."""
    needs = KernelRequirements(blocks)
    name, why = _FASTER.get((arch_of(device) or 0, blocks), ("", ""))
    if not name or choose_kernel("auto", device, dtype, needs).name in (name, os.environ.get("DBSP_KERNEL")):
        return None
    reason = KERNELS[name].why_unsupported(device, dtype, needs)
    how = f"set kernel: {name}" if reason is None else reason
    return f"{name} should be faster ({why}): {how}"


def returns_lse(kernel: str) -> bool:
    """Returns whether a kernel has the log-sum-exp that rings merge by; "auto" does. Raises UserError if unknown."""
    wanted = _wanted(kernel)
    return wanted == "auto" or KERNELS[wanted].returns_lse
