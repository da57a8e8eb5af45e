"""Which kernels there are, what each can do, and which one serves."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Container
from dataclasses import dataclass, field

import torch

from dbsp_kernels.backends import cpu, cudnn, fastvideo, flex, sparge
from dbsp_kernels.backends.cpu_backward import cpu_attention_backward
from dbsp_kernels.backends.reference import reference_attention
from dbsp_kernels.backward import BackwardInputs, Gradients, backward_by_autograd
from dbsp_kernels.errors import UserError
from dbsp_kernels.inputs import KernelInputs
from dbsp_kernels.merge import PartialAttention

__all__ = [
    "KERNELS",
    "Kernel",
    "KernelRequirements",
    "available",
    "choose_kernel",
    "explain_auto",
    "interpreted",
    "require_supported",
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
    tokens:      of a head; None: not known yet
    backward:    gradients will be asked for
    """

    blocks: tuple[int, int] | None = None
    width: int | None = None
    lse: bool = False
    ragged_rows: bool = False
    tokens: int | None = None
    backward: bool = False


@dataclass(frozen=True)
class Kernel:
    """A kernel and its capabilities.

    run:             the attention; see `dbsp_kernels.block_attention`
    backward:        its gradients, or None; see `dbsp_kernels.block_attention_backward`
    why_no_backward: says, of q of a dtype and a D (None: unknown) on an architecture, why it has none there, or None
    devices:         device types it runs on; dtypes: of q, k, v
    archs:           architectures of GPUs it runs on, 90 for Hopper; None: any
    blocks:          says which (block_q, block_k) it serves on an architecture (None: unknown) for q of a dtype and
                     a D (None: unknown); or None: any
    widths:          the Ds it serves; least_tokens: of a head
    returns_lse:     whether its log-sum-exp is one
    ragged_rows:     whether it serves other rows than those of whole heads
    merges:          whether it merges into `partial` and gives `out_dtype` by itself
    why_unavailable: says why it cannot work on this machine, or None
    interpreted:     whether Triton's interpreter can run it on the CPU
    by_name_only:    "auto" never takes it
    """

    name: str
    run: Callable[[KernelInputs], PartialAttention]
    devices: frozenset[str]
    backward: Callable[[BackwardInputs], Gradients] | None = field(default=None, kw_only=True)
    why_no_backward: Callable[[int | None, torch.dtype, int | None], str | None] = field(
        default=lambda *_: None, kw_only=True
    )
    dtypes: frozenset[torch.dtype] = _FLOATS
    archs: frozenset[int] | None = None
    blocks: Callable[[int | None, torch.dtype, int | None], frozenset[tuple[int, int]] | None] = lambda *_: None
    widths: Container[int] = range(1, 1 << 20)
    least_tokens: int = 1
    returns_lse: bool = True
    ragged_rows: bool = True
    merges: bool = False
    why_unavailable: Callable[[], str | None] = lambda: None
    interpreted: bool = False
    by_name_only: bool = False

    def why_unsupported(
        self, device: torch.device | str, dtype: torch.dtype, needs: KernelRequirements | None = None
    ) -> str | None:
        """Why this kernel cannot serve such tensors and needs here, or None."""
        needs, device = needs or KernelRequirements(), torch.device(device)
        if device.type not in self.devices and not (device.type == "cpu" and self.interpreted and interpreted()):
            return f"it runs on {', '.join(sorted(self.devices))}, the tensors are on {device.type}"
        if dtype not in self.dtypes:
            return f"it takes {', '.join(sorted(str(d) for d in self.dtypes))}, the tensors are {dtype}"
        reason = self.why_unsupported_anywhere(needs) or self.why_unavailable()
        if reason is not None:
            return reason
        arch = _arch(device)
        if arch is not None and self.archs is not None and arch not in self.archs:
            served = ", ".join(f"{served // 10}.{served % 10}" for served in sorted(self.archs))
            return f"it serves GPUs of compute capability {served}; {device} has {arch // 10}.{arch % 10}"
        without = self.why_no_backward(arch, dtype, needs.width) if needs.backward else None
        if without is not None:
            return without
        blocks = self.blocks(arch, dtype, needs.width)
        if blocks is None or (needs.blocks or next(iter(blocks), None)) in blocks:
            return None
        of_these = f"{dtype} with head dim {needs.width} here"
        if not blocks:
            return f"it serves no {of_these}"
        served = ", ".join(f"{q}×{k}" for q, k in sorted(blocks))
        return f"it serves blocks of {served}, not {needs.blocks[0]}×{needs.blocks[1]}"  # type: ignore[index]

    def why_unsupported_anywhere(self, needs: KernelRequirements) -> str | None:
        """Why this kernel cannot serve such a plan on any machine, or None."""
        if needs.lse and not self.returns_lse:
            return "it returns no log-sum-exp, by which a ring's periods are merged; use a strategy UxR1"
        if needs.ragged_rows and not self.ragged_rows:
            return "it serves only whole heads, and here heads are split over ranks or cut by text of uneven length"
        if needs.backward and self.backward is None:
            return "it has no backward, and gradients are asked for"
        if needs.width is not None and needs.width not in self.widths:
            return f"it serves head dims {_listed(self.widths)}, not {needs.width}"
        if needs.tokens is not None and needs.tokens < self.least_tokens:
            return f"it serves heads of {self.least_tokens} tokens and more, not of {needs.tokens}"
        return None


def _listed(widths: Container[int]) -> str:
    if isinstance(widths, range):
        return f"from {widths.start} to {widths.stop - 1}"
    return " or ".join(map(str, sorted(widths)))  # type: ignore[call-overload]


def _arch(device: torch.device) -> int | None:
    """90 for Hopper; None where there is no such GPU to ask."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def interpreted() -> bool:
    """Whether Triton kernels run in Triton's interpreter, on the CPU: slow, but right, and without a GPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def _run_triton(inputs: KernelInputs) -> PartialAttention:
    from dbsp_kernels.triton.forward import triton_attention  # here: triton need not be installed

    return triton_attention(inputs)


def _run_triton_backward(inputs: BackwardInputs) -> Gradients:
    from dbsp_kernels.triton.backward import triton_attention_backward  # here: triton need not be installed

    return triton_attention_backward(inputs)


def _run_triton_ws(inputs: KernelInputs) -> PartialAttention:
    from dbsp_kernels.triton.hopper import hopper_attention  # here: triton need not be installed

    return hopper_attention(inputs)


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
        Kernel(
            "cpu",
            cpu.cpu_attention,
            frozenset({"cpu"}),
            backward=cpu_attention_backward,
            why_unavailable=cpu.why_unavailable,
        ),
        Kernel(
            "triton",
            _run_triton,
            frozenset({"cuda"}),
            _FLOATS - {torch.float64},
            widths=range(1, 257),
            merges=True,
            backward=_run_triton_backward,
            why_unavailable=_why_triton_unavailable,
            interpreted=True,
        ),
        Kernel(
            "flex",
            flex.flex_attention_packed,
            frozenset({"cuda"}),
            _HALVES | {torch.float32},
            backward=flex.flex_attention_packed_backward,
            blocks=lambda *_: flex.BLOCKS,
            widths=range(16, 257),
            why_unavailable=flex.why_unavailable,
        ),
        Kernel(
            "reference",
            reference_attention,
            frozenset({"cpu", "cuda"}),
            backward=backward_by_autograd(reference_attention),
        ),
        Kernel(
            "sparge",
            sparge.sparge_attention,
            frozenset({"cuda"}),
            _HALVES,
            archs=sparge.ARCHS,
            blocks=lambda arch, *_: sparge.blocks(arch),
            widths=frozenset({64, 128}),
            least_tokens=sparge.LEAST_TOKENS,
            returns_lse=False,
            ragged_rows=False,
            why_unavailable=sparge.why_unavailable,
            by_name_only=True,
        ),
        Kernel(
            "triton-ws",
            _run_triton_ws,
            frozenset({"cuda"}),
            _HALVES,
            archs=frozenset({90}),
            blocks=lambda *_: flex.BLOCKS,
            widths=frozenset({64, 128}),
            why_unavailable=_why_triton_unavailable,
            by_name_only=True,
        ),
        Kernel(
            "cudnn",
            cudnn.cudnn_attention,
            frozenset({"cuda"}),
            _HALVES,
            backward=cudnn.cudnn_attention_backward,
            why_no_backward=cudnn.why_no_backward,
            archs=cudnn.ARCHS,
            blocks=cudnn.blocks,
            widths=frozenset({64, 96, 128}),
            why_unavailable=cudnn.why_unavailable,
            by_name_only=True,
        ),
        Kernel(
            "fastvideo",
            fastvideo.fastvideo_attention,
            frozenset({"cuda"}),
            frozenset({torch.bfloat16}),
            archs=fastvideo.ARCHS,
            blocks=lambda *_: fastvideo.BLOCKS,
            widths=frozenset({64, 128}),
            why_unavailable=fastvideo.why_unavailable,
            by_name_only=True,
        ),
    )
}
"""By name, in the order in which "auto" prefers them. Taken only by name: sparge, which quantises, and those that no
GPU has yet shown to be right and faster."""


def available(
    device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32, needs: KernelRequirements | None = None
) -> list[str]:
    """Names of the kernels that can serve tensors of `dtype` on `device` here, best first."""
    return [name for name, kernel in KERNELS.items() if kernel.why_unsupported(device, dtype, needs) is None]


def _wanted(name: str) -> str:
    """The kernel asked for: "auto" is $DBSP_KERNEL if set. Raises ValueError for one that there is not."""
    wanted = (os.environ.get("DBSP_KERNEL") or "auto") if name == "auto" else name
    if wanted != "auto" and wanted not in KERNELS:
        raise UserError(f"unknown kernel {wanted!r}; use auto or one of {', '.join(KERNELS)}")
    return wanted


def choose_kernel(
    name: str, device: torch.device | str, dtype: torch.dtype, needs: KernelRequirements | None = None
) -> Kernel:
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
        if not kernel.by_name_only and kernel.why_unsupported(device, dtype, needs) is None:
            return kernel
    raise UserError(f"no attention kernel serves {dtype} on {device}; use float32, float16 or bfloat16")


def require_supported(name: str, needs: KernelRequirements) -> None:
    """Raises ValueError, naming kernels that can, when the kernel called `name` can serve such a plan on no machine.

    Asks for nothing that differs between ranks, so that all of them raise alike.
    """
    wanted = _wanted(name)
    reason = None if wanted == "auto" else KERNELS[wanted].why_unsupported_anywhere(needs)
    if reason is not None:
        instead = " or ".join(k.name for k in KERNELS.values() if k.why_unsupported_anywhere(needs) is None)
        raise UserError(f"kernel {wanted!r} cannot serve this plan: {reason}; use {instead}")


def explain_auto(device: torch.device | str, dtype: torch.dtype) -> str:
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
