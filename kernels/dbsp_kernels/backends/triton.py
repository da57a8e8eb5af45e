"""db-SP's own Triton kernels, imported when they run: Triton need not be installed."""

from __future__ import annotations

import importlib.util

import torch

from dbsp_kernels.dispatch import interpreted
from dbsp_kernels.inputs import BackwardInputs, Gradients, KernelInputs, PartialAttention
from dbsp_kernels.kernel import FLOATS, Kernel

__all__ = ["KERNEL", "why_unavailable"]


def why_unavailable() -> str | None:
    """Why these kernels cannot work here, or None."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed; run `pip install triton`"
    if not torch.cuda.is_available() and not interpreted():
        return "there is no GPU, and TRITON_INTERPRET=1 is not set"
    if torch.cuda.is_available() and torch.version.cuda and torch.cuda.get_device_capability() < (8, 0):
        return "it needs a GPU of compute capability 8.0 (Ampere) or newer"
    return None


def _attention(inputs: KernelInputs) -> PartialAttention:
    from dbsp_kernels.triton.forward import triton_attention

    return triton_attention(inputs)


def _attention_backward(inputs: BackwardInputs) -> Gradients:
    from dbsp_kernels.triton.backward import triton_attention_backward

    return triton_attention_backward(inputs)


KERNEL = Kernel(
    name="triton",
    run=_attention,
    backward=_attention_backward,
    devices=frozenset({"cuda"}),
    dtypes=FLOATS - {torch.float64},
    widths=range(1, 257),
    merges=True,
    why_unavailable=why_unavailable,
    interpreted=True,
    auto_on=frozenset({"cuda"}),
)
