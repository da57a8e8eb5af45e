"""Derivatives and batching that torch carries within tensors, and that no exchange between ranks can follow."""

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
    """What is to be said of tensors whose derivatives would be lost, or that stand for others."""
    if any(torch._C._functorch.is_functorch_wrapped_tensor(tensor) for tensor in tensors):
        return _TRANSFORMED
    if any(unpack_dual(tensor).tangent is not None for tensor in tensors):
        return _FORWARD_MODE
    return None


def outside_transforms() -> AbstractContextManager[object]:
    """Within it tensors are plain, also where the caller is inside a transform of torch.func: ranks can exchange them.

    Not for tensors that were made inside the transform.
    """
    if torch._C._functorch.peek_interpreter_stack() is None:
        return nullcontext()
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack  # loaded by the transform itself

    return temporarily_clear_interpreter_stack()
