"""The backward of one attention over packed rows: what kernels are given for it, and one for any of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from dbsp_kernels.inputs import KernelInputs
from dbsp_kernels.merge import PartialAttention, lse_dtype

__all__ = ["BackwardInputs", "Gradients", "TransposedTable", "backward_by_autograd"]

Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""dq [Rq, Bq, D], dk and dv [Ck, Bk, D], of `lse_dtype`; zero where nothing was attended to."""


@dataclass(frozen=True, eq=False)
class TransposedTable:
    """Which rows attend to each packed block: `kv_index` and `kv_count` the other way round.

    Attributes:
        rows: int32[Ck, most], in rising order: the first `count` of each block's entries.
        count: int32[Ck].
    """

    rows: torch.Tensor
    count: torch.Tensor


@dataclass(frozen=True, eq=False)
class BackwardInputs:
    """What a kernel's backward is given.

    Attributes:
        forward: q, k, v, scale and tables, as the forward had them; `partial` and `out_dtype` are None.
        dout: [Rq, Bq, D].
        out, lse: The attention's over *all* keys, those of other calls too: the gradients of calls over disjoint keys
            then just add up, because each one's P = exp(scale·QKᵀ − lse) is its part of the whole softmax.
        transposed: Makes the transposed table, for kernels that need it.
    """

    forward: KernelInputs
    dout: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor
    transposed: Callable[[], TransposedTable]

    def delta(self) -> torch.Tensor:
        """Σ dout · out, [Rq, Bq], of lse's dtype."""
        return (self.dout.to(self.lse.dtype) * self.out.to(self.lse.dtype)).sum(dim=-1)

    def check(self) -> None:
        """Raises ValueError for shapes that do not go together."""
        q = self.forward.q
        if not self.dout.shape == self.out.shape == q.shape or self.lse.shape != q.shape[:2]:
            shapes = ", ".join(str(tuple(t.shape)) for t in (self.dout, self.out, self.lse))
            raise ValueError(f"expected dout, out {tuple(q.shape)} and lse {tuple(q.shape[:2])}, got {shapes}")


def backward_by_autograd(run: Callable[[KernelInputs], PartialAttention]) -> Callable[[BackwardInputs], Gradients]:
    """A backward for a forward that autograd can follow, out and log-sum-exp both; it is computed once more.

    The whole attention is Σ wᵢ·outᵢ with wᵢ = exp(lseᵢ − lse), so that of this call's (outᵢ, lseᵢ) the gradients are
    wᵢ·dout and wᵢ·Σ dout·(outᵢ − out).
    """

    def backward(inputs: BackwardInputs) -> Gradients:
        given = inputs.forward
        wide = lse_dtype(given.q.dtype)
        leaves = [t.detach().requires_grad_(True) for t in (given.q, given.k, given.v)]
        with torch.enable_grad():
            out, lse = run(replace(given, q=leaves[0], k=leaves[1], v=leaves[2]))
        if not out.requires_grad:  # no row has a block
            return tuple(torch.zeros_like(t, dtype=wide) for t in leaves)  # type: ignore[return-value]
        dout, part = inputs.dout.to(wide), out.detach().to(wide)
        weight = torch.exp(lse.detach() - inputs.lse.masked_fill(torch.isneginf(inputs.lse), torch.inf))
        dlse = weight * (dout * part).sum(-1) - weight * inputs.delta()
        grads = torch.autograd.grad((out, lse), leaves, ((weight[..., None] * dout).to(out.dtype), dlse.to(lse.dtype)))
        return tuple(grad.to(wide) for grad in grads)  # type: ignore[return-value]

    return backward
