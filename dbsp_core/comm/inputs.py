"""Checks of q, k and v before ranks exchange them."""

from __future__ import annotations

import torch

from dbsp_core.comm.transforms import unfollowed
from dbsp_core.utils.fingerprint import fingerprint_of

__all__ = ["DIMENSIONS", "INPUTS_DIFFER", "inputs_fingerprint", "needs_gradients", "problem_of_inputs"]

DIMENSIONS = "q, k, v are [batch, heads, tokens, D]"
INPUTS_DIFFER = (
    "batch, head size or dtype of q, k and v, or whether they need gradients, differ on rank(s) {}; "
    "give all ranks the same"
)


def needs_gradients(*tensors: torch.Tensor) -> bool:
    """Returns whether autograd records what is computed from these tensors."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def inputs_fingerprint(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> int:
    """Returns a number below 2^63 that is equal for inputs that ranks can exchange.

    These agree in batch, heads, head size and dtype, and in whether they need gradients.
    """
    return fingerprint_of((*q.shape[:2], *q.shape[3:], q.dtype, needs_gradients(q, k, v)))


def problem_of_inputs(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, heads: int, tokens: int, why: str
) -> str | None:
    """Returns what is wrong with this rank's inputs, or None.

    q, k and v must be [B, `heads`, `tokens`, D]; `why` says in the message where these numbers come from.
    """
    lost = unfollowed(q, k, v)
    if lost is not None:
        return lost
    if not (q.ndim == 4 and q.shape == k.shape == v.shape):
        shapes = ", ".join(str(tuple(t.shape)) for t in (q, k, v))
        return f"q, k, v must be [batch, heads, n_local, D] of one shape, got {shapes}"
    if q.shape[1:3] != (heads, tokens):
        turned = q.shape[1:3] == (tokens, heads)
        hint = "; this looks like [batch, tokens, heads, D]: transpose(1, 2)" if turned else ""
        return f"q of shape {tuple(q.shape)} does not fit: {why}{hint}"
    if not q.dtype == k.dtype == v.dtype:
        dtypes = ", ".join(str(t.dtype).removeprefix("torch.") for t in (q, k, v))
        return f"q, k, v must be of one dtype, got {dtypes}; cast them to one"
    if 0 in (q.shape[0], q.shape[3]):
        return f"q, k, v of shape {tuple(q.shape)} hold nothing to attend with; leave such a call out, on all ranks"
    return None
