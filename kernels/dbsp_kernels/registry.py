"""Which kernels there are, what each can do, and which one serves."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass

import torch

from dbsp_kernels import cpu, flex, sparge
from dbsp_kernels.errors import UserError
from dbsp_kernels.inputs import KernelInputs
from dbsp_kernels.merge import PartialAttention
from dbsp_kernels.reference import reference_attention

__all__ = [
    "KERNELS",
    "Kernel",
    "KernelRequirements",
    "available",
    "choose_kernel",
    "explain_auto",
    "interpreted",
    "require_fit",
    "returns_lse",
]


_HALVES = frozenset({torch.bfloat16, torch.float16})
_FLOATS = _HALVES | {torch.float32, torch.float64}


@dataclass(frozen=True)
class KernelRequirements:
    """What an attention asks of its kernel, beside device and dtype.

    blocks:      (block_q, block_k); None: not known yet
    width:       D; None: not known yet
    lse:         its log-sum-exp is used: rings merge the results of ring steps by it
    ragged_rows: the rows are not simply all rows of whole heads: heads are split, or in a ring
    """

    blocks: tuple[int, int] | None = None
    width: int | None = None
    lse: bool = False
    ragged_rows: bool = False


@dataclass(frozen=True)
class Kernel:
    """A kernel and its capabilities.

    run:             the attention; see `dbsp_kernels.block_attention`
    devices:         device types it runs on; dtypes: of q, k, v
    blocks:          says which (block_q, block_k) it serves here, or None: any
    widths:          the least and the largest D
    returns_lse:     whether its log-sum-exp is one
    ragged_rows:     whether it serves other rows than those of whole heads
    merges:          whether it merges into `partial` and gives `out_dtype` by itself
    why_unavailable: says why it cannot work on this machine, or None
    interpreted:     whether Triton's interpreter can run it on the CPU
    """

    name: str
    run: Callable[[KernelInputs], PartialAttention]
    devices: frozenset[str]
    dtypes: frozenset[torch.dtype] = _FLOATS
    blocks: Callable[[], frozenset[tuple[int, int]] | None] = lambda: None
    widths: tuple[int, int] = (1, 1 << 20)
    returns_lse: bool = True
    ragged_rows: bool = True
    merges: bool = False
    why_unavailable: Callable[[], str | None] = lambda: None
    interpreted: bool = False

    def why_unsupported(self, device: str, dtype: torch.dtype, needs: KernelRequirements | None = None) -> str | None:
        """Why this kernel cannot serve such tensors and needs here, or None."""
        needs = needs or KernelRequirements()
        if device not in self.devices and not (device == "cpu" and self.interpreted and interpreted()):
            return f"it runs on {', '.join(sorted(self.devices))}, the tensors are on {device}"
        if dtype not in self.dtypes:
            return f"it takes {', '.join(sorted(str(d) for d in self.dtypes))}, the tensors are {dtype}"
        reason = self.why_unsupported_anywhere(needs) or self.why_unavailable()
        if reason is not None or needs.blocks is None:
            return reason
        blocks = self.blocks()  # asked last: the geometry of some kernels depends on the device
        if blocks is None or needs.blocks in blocks:
            return None
        served = ", ".join(f"{q}×{k}" for q, k in sorted(blocks))
        return f"it serves blocks of {served}, not {needs.blocks[0]}×{needs.blocks[1]}"

    def why_unsupported_anywhere(self, needs: KernelRequirements) -> str | None:
        """Why this kernel cannot serve such a plan on any machine, or None."""
        if needs.lse and not self.returns_lse:
            return "it returns no log-sum-exp, by which a ring's periods are merged; use a strategy UxR1"
        if needs.ragged_rows and not self.ragged_rows:
            return "it serves only whole heads, and here heads are split over ranks or cut by text of uneven length"
        least, most = self.widths
        if needs.width is not None and not least <= needs.width <= most:
            return f"it serves head dims from {least} to {most}, not {needs.width}"
        return None


def interpreted() -> bool:
    """Whether Triton kernels run in Triton's interpreter, on the CPU: slow, but right, and without a GPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def _run_triton(inputs: KernelInputs) -> PartialAttention:
    from dbsp_kernels.triton.forward import triton_attention  # here: triton need not be installed

    return triton_attention(inputs)


def _why_triton_unavailable() -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed; pip install 'dbsp-attention[gpu]'"
    if not torch.cuda.is_available() and not interpreted():
        return "there is no GPU, and TRITON_INTERPRET=1 is not set"
    if torch.cuda.is_available() and torch.version.cuda and torch.cuda.get_device_capability() < (8, 0):
        return "it needs a GPU of compute capability 8.0 (Ampere) or newer"
    return None


KERNELS = {
    kernel.name: kernel
    for kernel in (
        Kernel("cpu", cpu.cpu_attention, frozenset({"cpu"}), why_unavailable=cpu.why_unavailable),
        Kernel(
            "triton",
            _run_triton,
            frozenset({"cuda"}),
            _FLOATS - {torch.float64},
            widths=(1, 256),
            merges=True,
            why_unavailable=_why_triton_unavailable,
            interpreted=True,
        ),
        Kernel(
            "flex",
            flex.flex_attention_packed,
            frozenset({"cuda"}),
            _HALVES | {torch.float32},
            blocks=lambda: flex.BLOCKS,
            widths=(16, 256),
            why_unavailable=flex.why_unavailable,
        ),
        Kernel("reference", reference_attention, frozenset({"cpu", "cuda"})),
        Kernel(
            "sparge",
            sparge.sparge_attention,
            frozenset({"cuda"}),
            _HALVES,
            blocks=sparge.blocks,
            widths=(64, 128),
            returns_lse=False,
            ragged_rows=False,
            why_unavailable=sparge.why_unavailable,
        ),
    )
}
"""By name, in the order in which "auto" prefers them. The reference serves all, so sparge, which quantises, is taken
only by name."""


def available(
    device: str = "cpu", dtype: torch.dtype = torch.float32, needs: KernelRequirements | None = None
) -> list[str]:
    """Names of the kernels that can serve tensors of `dtype` on `device` here, best first."""
    return [name for name, kernel in KERNELS.items() if kernel.why_unsupported(device, dtype, needs) is None]


def _wanted(name: str) -> str:
    """The kernel asked for: "auto" is $DBSP_KERNEL if set. Raises ValueError for one that there is not."""
    wanted = (os.environ.get("DBSP_KERNEL") or "auto") if name == "auto" else name
    if wanted != "auto" and wanted not in KERNELS:
        raise UserError(f"unknown kernel {wanted!r}; use auto or one of {', '.join(KERNELS)}")
    return wanted


def choose_kernel(name: str, device: str, dtype: torch.dtype, needs: KernelRequirements | None = None) -> Kernel:
    """The kernel called `name`; "auto" is $DBSP_KERNEL if set, else the best that can serve `dtype` on `device`.

    Raises ValueError, naming one that can, when the kernel is unknown or cannot serve.
    """
    wanted = _wanted(name)
    if wanted != "auto":
        reason = KERNELS[wanted].why_unsupported(device, dtype, needs)
        if reason is None:
            return KERNELS[wanted]
        instead = " or ".join(available(device, dtype, needs)) or "another dtype"
        raise UserError(f"kernel {wanted!r} cannot be used here: {reason}; use {instead}")
    for kernel in KERNELS.values():
        if kernel.why_unsupported(device, dtype, needs) is None:
            return kernel
    raise UserError(f"no attention kernel serves {dtype} on {device}; use float32, float16 or bfloat16")


def require_fit(name: str, needs: KernelRequirements) -> None:
    """Raises ValueError, naming kernels that can, when the kernel called `name` can serve such a plan on no machine.

    Asks for nothing that differs between ranks, so that all of them raise alike.
    """
    wanted = _wanted(name)
    reason = None if wanted == "auto" else KERNELS[wanted].why_unsupported_anywhere(needs)
    if reason is not None:
        instead = " or ".join(k.name for k in KERNELS.values() if k.why_unsupported_anywhere(needs) is None)
        raise UserError(f"kernel {wanted!r} cannot serve this plan: {reason}; use {instead}")


def explain_auto(device: str, dtype: torch.dtype) -> str:
    """What "auto" takes for `dtype` on `device` here, and why, in one sentence."""
    name = choose_kernel("auto", device, dtype).name
    if os.environ.get("DBSP_KERNEL"):
        return f"{name}, because DBSP_KERNEL={os.environ['DBSP_KERNEL']}"
    better = [n for n in list(KERNELS)[: list(KERNELS).index(name)] if device in KERNELS[n].devices]
    passed = [f"{other}: {KERNELS[other].why_unsupported(device, dtype)}" for other in better]
    return f"{name}, the best that serves {dtype} on {device}" + (f" ({'; '.join(passed)})" if passed else "")


def returns_lse(kernel: str) -> bool:
    """Whether a kernel returns the log-sum-exp that rings merge by; "auto" is chosen to.

    Raises ValueError for an unknown name.
    """
    wanted = _wanted(kernel)
    return wanted == "auto" or KERNELS[wanted].returns_lse
