"""Checks of q, k and v before ranks exchange them."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from dbsp_core.comm.transforms import unfollowed

__all__ = ["DIMENSIONS", "InputsAgreed", "needs_gradients", "problem_of_inputs"]

DIMENSIONS = "q, k, v are [batch, heads, tokens, D]"
INFERENCE_TENSORS = (
    "q, k or v was made under torch.inference_mode(), so that gradients cannot flow through it; make it under "
    "torch.no_grad(), or call attention under torch.inference_mode() too"
)


def needs_gradients(*tensors: torch.Tensor) -> bool:
    """Returns whether autograd records what is computed from these tensors."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def problem_of_inputs(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    heads: int,
    tokens: int,
    why: str,
    no_gradients: str | None = None,
) -> str | None:
    """Returns what is wrong with this rank's inputs, or None.

    q, k and v must be [B, `heads`, `tokens`, D]; `why` says in the message where these numbers come from, and
    `no_gradients` why gradients cannot be had, if so.
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
    if no_gradients is not None and needs_gradients(q, k, v):
        return no_gradients
    if needs_gradients(q, k, v) and any(t.is_inference() for t in (q, k, v)):
        return INFERENCE_TENSORS
    return None


@dataclass
class InputsAgreed:
    """Kinds of q, k and v that all ranks have compared: device, dtype, head size, and whether gradients are needed."""

    _known: set[tuple[torch.device, torch.dtype, torch.Size, bool]] = field(default_factory=set)

    def is_new(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, problem: str | None) -> bool:
        """Returns whether ranks must compare these inputs, and remembers them as compared.

        A `problem` of one rank alone can be shared only where the others compare too: at the first call.
        """
        kind = q.device, q.dtype, q.shape[-1:], needs_gradients(q, k, v)
        if kind in self._known or (problem is not None and self._known):
            return False
        self._known.add(kind)
        return True
