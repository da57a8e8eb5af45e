"""Table of kernels with the inputs that each supports, and `choose_kernel`."""

from __future__ import annotations

import functools
import os
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from dbsp_kernels.backends import cpu, fa4, flashinfer, sparge
from dbsp_kernels.errors import UserError
from dbsp_kernels.inputs import BackwardInputs, Gradients, KernelInputs, PartialAttention
from dbsp_kernels.triton.launch import capability_of, interpreted, why_unavailable
from dbsp_kernels.triton.tiles import int8_tiles_for, row_slots

HALVES = frozenset({torch.bfloat16, torch.float16})
FLOATS = HALVES | {torch.float32, torch.float64}


@dataclass(frozen=True)
class KernelRequirements:
    """Requirements of an attention on its kernel, apart from device and dtype. None: unknown."""

    blocks: tuple[int, int] | None = None  # (block_q, block_k)
    head_dim: int | None = None
    lse: bool = False  # True if the log-sum-exp is used, for example to merge chunks
    ragged_rows: bool = False  # True if not all rows of a head are there, because it is split over ranks or a ring
    tokens: int | None = None  # per head
    backward: bool = False  # True if gradients are needed


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """A kernel and its capabilities."""

    name: str
    run: Callable[[KernelInputs], PartialAttention]  # see `dbsp_kernels.block_attention`
    devices: frozenset[str]  # device types, such as "cuda"
    backward: Callable[[BackwardInputs], Gradients] | None = None  # see `dbsp_kernels.block_attention_backward`
    dtypes: frozenset[torch.dtype] = FLOATS  # of q, k and v
    blocks: Mapping[int, frozenset[tuple[int, int]]] | None = None
    """Supported (block_q, block_k) by GPU architecture, 90 for Hopper; None: any."""
    head_dims: Sequence[int] = range(1, 1 << 20)  # supported values of D
    least_tokens: int = 1  # per head
    returns_lse: bool = True  # False if the log-sum-exp is NaN
    ragged_rows: bool = True  # False if it supports only rows of whole heads
    approximates: bool = False  # True if it rounds more than its dtypes do; "auto" never chooses it
    merges: bool = False  # True if it merges into `partial` and returns `out_dtype` itself
    slots: Callable[[torch.Tensor, tuple[int, int]], int | None] | None = None
    """Returns how many rows of q [..., D] in blocks (block_q, block_k) a GPU computes at a time, or None off GPUs.
    None: the kernel orders rows itself and does not support `parts`."""
    why_unavailable: Callable[[], str | None] = lambda: None  # returns why it is unavailable on this machine, or None
    interpreted: bool = False  # True if Triton's interpreter can run it on the CPU
    auto_on: frozenset[str] = frozenset()  # device types on which "auto" may choose it (where tests run it)

    def why_unsupported(
        self, device: torch.device | str, dtype: torch.dtype, needs: KernelRequirements | None = None
    ) -> str | None:
        """Returns why this kernel does not support these tensors and requirements here, or None."""
        needs, device = needs or KernelRequirements(), torch.device(device)
        if device.type not in self.devices and not (device.type == "cpu" and self.interpreted and interpreted()):
            return f"it runs on {', '.join(sorted(self.devices))}, got tensors on {device.type}"
        if dtype not in self.dtypes:
            return f"it supports {', '.join(sorted(str(d) for d in self.dtypes))}, got {dtype}"
        reason = self.why_unsupported_anywhere(replace(needs, blocks=None)) or self.why_unavailable()
        if reason is not None or self.blocks is None:
            return reason
        arch = capability_of(device) if device.type == "cuda" and torch.cuda.is_available() else None
        if arch is not None and arch not in self.blocks:
            supported = ", ".join(f"{capability // 10}.{capability % 10}" for capability in sorted(self.blocks))
            return f"it supports GPUs of compute capability {supported}, got {arch // 10}.{arch % 10} ({device})"
        return self._why_unsupported_blocks(needs.blocks, frozenset() if arch is None else self.blocks[arch])

    def _why_unsupported_blocks(
        self, blocks: tuple[int, int] | None, supported: frozenset[tuple[int, int]] = frozenset()
    ) -> str | None:
        """Returns why (block_q, block_k) are not supported (by default on any GPU), or None."""
        supported = supported or frozenset().union(*(self.blocks or {}).values())
        if blocks is None or not supported or blocks in supported:
            return None
        shown = ", ".join(f"{q}×{k}" for q, k in sorted(supported))
        return f"it supports blocks of {shown} (block_q × block_k of the mask), got {blocks[0]}×{blocks[1]}"

    def why_unsupported_anywhere(self, needs: KernelRequirements) -> str | None:
        """Returns why no machine can run these requirements with this kernel, or None."""
        heads = self.head_dims
        dims = f"from {heads.start} to {heads.stop - 1}" if isinstance(heads, range) else " or ".join(map(str, heads))
        if needs.lse and not self.returns_lse:
            return "it returns no log-sum-exp, which merging chunks of keys needs; use a strategy UxR1"
        if needs.ragged_rows and not self.ragged_rows:
            return "it supports only whole heads, but heads are split over ranks or by texts of unequal length"
        if needs.backward and self.backward is None:
            return "it has no backward, but gradients are needed"
        if needs.head_dim is not None and needs.head_dim not in heads:
            return f"it supports head dims {dims}, got {needs.head_dim}"
        if needs.tokens is not None and needs.tokens < self.least_tokens:
            return f"it needs at least {self.least_tokens} tokens per head, got {needs.tokens}"
        return self._why_unsupported_blocks(needs.blocks)


def _of_triton(name: str) -> Callable[..., Any]:
    """Returns a function of `dbsp_kernels.triton`, imported at its first call because triton is optional."""
    return lambda inputs: _imported(f"dbsp_kernels.triton.{name}")(inputs)


_imported = functools.cache(pkgutil.resolve_name)
_CPU, _CUDA = frozenset({"cpu"}), frozenset({"cuda"})
_TRITON = Kernel(
    name="triton",
    run=_of_triton("forward:triton_attention"),
    backward=_of_triton("backward:triton_attention_backward"),
    devices=_CUDA,
    dtypes=FLOATS - {torch.float64},
    head_dims=range(1, 257),
    merges=True,
    slots=row_slots,
    why_unavailable=why_unavailable,
    interpreted=True,
    auto_on=_CUDA,
)
_TRITON_INT8 = replace(
    _TRITON,
    name="triton-int8",
    run=_of_triton("forward:triton_int8_attention"),
    backward=None,
    approximates=True,
    slots=functools.partial(row_slots, choose=int8_tiles_for),
    auto_on=frozenset(),
)
_IN_ORDER = (
    Kernel(
        name="cpu",
        run=cpu.cpu_attention,
        backward=cpu.cpu_attention_backward,
        devices=_CPU,
        why_unavailable=cpu.why_unavailable,
        auto_on=_CPU,
    ),
    _TRITON,
    Kernel(
        name="reference",
        run=cpu.reference_attention,
        backward=cpu.reference_attention_backward,
        devices=_CPU | _CUDA,
        auto_on=_CPU,  # a loop over rows takes hours on CUDA
    ),
    Kernel(
        name="fa4",
        run=fa4.fa4_attention,
        devices=_CUDA,
        dtypes=HALVES,
        blocks=fa4.BLOCKS,
        head_dims=(64, 96, 128),
        why_unavailable=fa4.why_unavailable,
    ),
    Kernel(
        name="flashinfer",
        run=flashinfer.flashinfer_attention,
        devices=_CUDA,
        dtypes=HALVES,
        blocks=flashinfer.BLOCKS,
        head_dims=(128,),
        why_unavailable=flashinfer.why_unavailable,
    ),
    Kernel(
        name="sparge",
        run=sparge.sparge_attention,
        devices=_CUDA,
        dtypes=HALVES,
        blocks=sparge.BLOCKS,
        head_dims=(64, 128),
        least_tokens=128,  # asserted by SpargeAttn
        returns_lse=False,
        ragged_rows=False,
        approximates=True,
        why_unavailable=sparge.why_unavailable,
    ),
    _TRITON_INT8,
)
KERNELS: dict[str, Kernel] = {kernel.name: kernel for kernel in _IN_ORDER}  # kernels by name, in order of preference


def available(device: torch.device | str, dtype: torch.dtype, needs: KernelRequirements | None = None) -> list[str]:
    """Returns the names of kernels that support tensors of `dtype` on `device` on this machine, best first."""
    return [name for name, kernel in KERNELS.items() if kernel.why_unsupported(device, dtype, needs) is None]


def require_kernel_name(name: str, source: str = "kernel") -> None:
    """Raises UserError unless `name`, set by `source`, is "auto" or a kernel."""
    if name != "auto" and name not in KERNELS:
        raise UserError(f"unknown {source} {name[:80]!r}; use one of auto, {', '.join(KERNELS)}")


def _requested(name: str) -> str:
    """Returns `name`, or for "auto" $DBSP_KERNEL if set. Raises UserError for unknown names."""
    from_environment = os.environ.get("DBSP_KERNEL") if name == "auto" else None
    require_kernel_name(from_environment or name, "DBSP_KERNEL" if from_environment else "kernel")
    return from_environment or name


def choose_kernel(
    name: str, device: torch.device | str, dtype: torch.dtype, needs: KernelRequirements | None = None
) -> Kernel:
    """Returns the kernel called `name`; for "auto" $DBSP_KERNEL if set, else the best supported kernel.

    For a comma-separated list such as "fa4,auto", returns the first supported kernel. Raises UserError for an unknown
    kernel, or one that does not support `dtype`, `device` or `needs`.
    """
    *_, requested = asked = [_requested(each) for each in name.split(",")]
    reasons = {}
    of_auto = [kernel.name for kernel in KERNELS.values() if torch.device(device).type in kernel.auto_on]
    for kernel in (KERNELS[candidate] for first in asked for candidate in (of_auto if first == "auto" else [first])):
        reason = kernel.why_unsupported(device, dtype, needs)
        if reason is None:
            return kernel
        reasons[kernel.name] = reason
    instead = " or ".join(available(device, dtype, needs)) or "another dtype"
    if requested == "auto":
        rejected = "; ".join(f"{name}: {reason}" for name, reason in reasons.items()) or "none runs on this device"
        raise UserError(f"kernel auto finds no kernel for {dtype} on {device} ({rejected}); use {instead}")
    raise UserError(f"kernel {requested!r} cannot be used here: {reasons[requested]}; use {instead}")


def require_supported(name: str, needs: KernelRequirements, device: torch.device | None = None) -> None:
    """Raises UserError if no machine can run `needs` with the kernel called `name`, so all ranks raise alike.

    With `device`, the kernel must also support `needs` there (ranks may then differ), unless it is for other devices.
    """
    requested = _requested(name)
    if requested == "auto":
        return
    kernel = KERNELS[requested]
    reason = kernel.why_unsupported_anywhere(needs)
    if reason is None and device is not None and device.type in kernel.devices:
        reason = kernel.why_unsupported(device, min(kernel.dtypes, key=str), needs)
    if reason is not None:
        instead = " or ".join(k.name for k in KERNELS.values() if k.why_unsupported_anywhere(needs) is None)
        raise UserError(f"kernel {requested!r} does not support this plan: {reason}; use {instead}")


def supports(name: str, needs: KernelRequirements) -> bool:
    """Returns True if some machine can run `needs` with this kernel, or for "auto". Raises UserError if unknown."""
    requested = _requested(name)
    return requested == "auto" or KERNELS[requested].why_unsupported_anywhere(needs) is None
