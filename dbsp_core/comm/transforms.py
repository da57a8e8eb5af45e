"""Derivatives and batching that torch keeps inside tensors, and that are lost in an exchange between ranks."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch.autograd.forward_ad import unpack_dual

__all__ = ["outside_transforms", "unfollowed"]

_FORWARD_MODE = (
    "q, k or v carries a forward-mode derivative (torch.autograd.forward_ad), which attention over ranks does not "
    "follow; take gradients with backward(), or the difference of two calls in place of a tangent"
)
_TRANSFORMED = (
    "q, k or v is inside a transform of torch.func (grad, jvp, vmap), which attention over ranks does not follow; "
    "take gradients with backward() or torch.autograd.grad, and put what vmap maps over into the batch dimension"
)


def unfollowed(*tensors: torch.Tensor) -> str | None:
    """Returns the complaint about tensors whose derivatives or batching would be lost, or None."""
    if any(torch._C._functorch.is_functorch_wrapped_tensor(tensor) for tensor in tensors):
        return _TRANSFORMED
    if any(unpack_dual(tensor).tangent is not None for tensor in tensors):
        return _FORWARD_MODE
    return None


def outside_transforms() -> AbstractContextManager[object]:
    """Leaves the caller's transform of torch.func, if any: ranks can exchange tensors that are made within the block.

    Tensors that were made inside the transform stay part of it.
    """
    if torch._C._functorch.peek_interpreter_stack() is None:
        return nullcontext()
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack  # loaded by the transform itself

    return temporarily_clear_interpreter_stack()
