"""What a kernel is: its functions, and what it can serve."""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass

import torch

from dbsp_kernels.dispatch import interpreted
from dbsp_kernels.inputs import BackwardInputs, Gradients, KernelInputs, PartialAttention

__all__ = ["FLOATS", "HALVES", "Kernel", "KernelRequirements", "arch_of"]

HALVES = frozenset({torch.bfloat16, torch.float16})
FLOATS = HALVES | {torch.float32, torch.float64}


@dataclass(frozen=True)
class KernelRequirements:
    """What an attention requires of its kernel apart from device and dtype.

    Attributes:
        blocks: (block_q, block_k); None: not known yet.
        width: D; None: not known yet.
        lse: Whether the log-sum-exp is used, by which rings merge the results of ring steps.
        ragged_rows: Whether rows are not simply all rows of whole heads: heads are split, or in a ring.
        tokens: Tokens of a head; None: not known yet.
        backward: Whether gradients will be computed.
    """

    blocks: tuple[int, int] | None = None
    width: int | None = None
    lse: bool = False
    ragged_rows: bool = False
    tokens: int | None = None
    backward: bool = False


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """A kernel and its capabilities.

    Attributes:
        run: The attention; see `dbsp_kernels.block_attention`.
        devices: Device types, such as "cuda".
        backward: The gradients, or None; see `dbsp_kernels.block_attention_backward`.
        dtypes: Dtypes of q, k and v.
        archs: Architectures of GPUs, 90 for Hopper; None: any.
        blocks: Returns the supported (block_q, block_k) on an architecture (None: unknown), or None if any are.
        widths: Values of D.
        least_tokens: Fewest tokens of a head.
        returns_lse: Whether it returns a log-sum-exp, and not NaN.
        ragged_rows: Whether it serves other rows than those of whole heads.
        merges: Whether it merges into `partial` and returns `out_dtype` by itself.
        why_unavailable: Returns why it cannot work on this machine, or None.
        interpreted: Whether Triton's interpreter can run it on the CPU.
        auto_on: Device types on which "auto" may choose it: those on which the tests run it.
    """

    name: str
    run: Callable[[KernelInputs], PartialAttention]
    devices: frozenset[str]
    backward: Callable[[BackwardInputs], Gradients] | None = None
    dtypes: frozenset[torch.dtype] = FLOATS
    archs: frozenset[int] | None = None
    blocks: Callable[[int | None], frozenset[tuple[int, int]] | None] = lambda arch: None
    widths: Container[int] = range(1, 1 << 20)
    least_tokens: int = 1
    returns_lse: bool = True
    ragged_rows: bool = True
    merges: bool = False
    why_unavailable: Callable[[], str | None] = lambda: None
    interpreted: bool = False
    auto_on: frozenset[str] = frozenset()

    def why_unsupported(
        self, device: torch.device | str, dtype: torch.dtype, needs: KernelRequirements | None = None
    ) -> str | None:
        """Returns why this kernel cannot serve such tensors and needs here, or None."""
        needs, device = needs or KernelRequirements(), torch.device(device)
        if device.type not in self.devices and not (device.type == "cpu" and self.interpreted and interpreted()):
            return f"it runs on {', '.join(sorted(self.devices))}, the tensors are on {device.type}"
        if dtype not in self.dtypes:
            return f"it takes {', '.join(sorted(str(d) for d in self.dtypes))}, the tensors are {dtype}"
        reason = self.why_unsupported_anywhere(needs) or self.why_unavailable()
        if reason is not None:
            return reason
        arch = arch_of(device)
        if arch is not None and self.archs is not None and arch not in self.archs:
            served = ", ".join(f"{served // 10}.{served % 10}" for served in sorted(self.archs))
            return f"it serves GPUs of compute capability {served}; {device} has {arch // 10}.{arch % 10}"
        blocks = self.blocks(arch)
        if blocks is None or needs.blocks is None or needs.blocks in blocks:
            return None
        served = ", ".join(f"{q}×{k}" for q, k in sorted(blocks))
        return f"it serves blocks of {served}, not {needs.blocks[0]}×{needs.blocks[1]}"

    def why_unsupported_anywhere(self, needs: KernelRequirements) -> str | None:
        """Returns why this kernel cannot serve such a plan on any machine, or None."""
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


def arch_of(device: torch.device | str) -> int | None:
    """Compute capability as one number, 90 for Hopper; None if the device is no GPU of this machine."""
    device = torch.device(device)
    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor
