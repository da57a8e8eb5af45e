"""Branches that models add to sparse attention: VSA's coarse branch and SLA's linear branch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch

ELEMENTS_AT_ONCE = 1 << 24
"""Elements of q, k or v converted to float32 at a time, to limit memory."""

FeatureMap = Callable[[torch.Tensor], torch.Tensor]
"""Maps q or k [..., D] to non-negative features of the same shape."""


class Branch(Protocol):
    """Added to this rank's output of sparse attention in one call."""

    name: ClassVar[str]  # Its name in messages
    without: ClassVar[str]  # The mask source's setting that disables it

    def add_to(self, out: torch.Tensor) -> None:
        """Adds to the local output in place, [B, H, n_local, D] or [1, B · H, n_local, D], except at padding."""
        ...


@dataclass(frozen=True, eq=False, repr=False)
class CoarseBranch:
    """Attention over pooled tokens, multiplied by a gate.

    (Zhang et al., VSA: Faster Video Diffusion with Trainable Sparse Attention, arXiv 2505.13389, 2025, Eq. 3.)
    """

    coarse: torch.Tensor  # float32[B · H, n, D], for the n query blocks with tokens on this rank
    block: torch.Tensor  # int64[n_local], index of each slot's block
    real: torch.Tensor  # bool[n_local], False at padding
    gate: torch.Tensor  # [B, H, n_local, D]
    name: ClassVar[str] = "coarse branch"
    without: ClassVar[str] = "coarse: false"

    def add_to(self, out: torch.Tensor) -> None:
        """Adds the branch to the local output [B, H, n_local, D] or [1, B · H, n_local, D]."""
        if not self.coarse.shape[1]:  # only padding on this rank
            return
        gate, coarse = (tensor.reshape(*out.shape[:2], *tensor.shape[-2:]) for tensor in (self.gate, self.coarse))
        added = gate * coarse.index_select(2, self.block)
        out.add_(added.masked_fill_(~self.real[:, None], 0.0))


@dataclass(frozen=True, eq=False, repr=False)
class LinearBranch:
    """Linear attention to all tokens, projected per head: φ(q) Σ φ(k)ᵀv / (φ(q) Σ φ(k)ᵀ + 1e-5).

    (Zhang et al., SLA: Beyond Sparsity in Diffusion Transformers via Fine-Tunable Sparse-Linear Attention, arXiv
    2509.24006, 2025; the epsilon is from its code.)
    """

    q: torch.Tensor  # [B, H, n_local, D]
    sums: torch.Tensor  # [B, H, D, D + 1], at least float32: Σ φ(k)ᵀ[v, 1] over the tokens of all ranks
    projection: torch.Tensor  # [D + 1, D], same dtype: projection of zeros, then of each unit channel
    real: torch.Tensor  # bool[n_local], False at padding
    feature: FeatureMap
    name: ClassVar[str] = "linear branch"
    without: ClassVar[str] = "linear: false"

    def add_to(self, out: torch.Tensor) -> None:
        """Adds the branch to the local output [B, H, n_local, D] or [1, B · H, n_local, D]."""
        q, sums = self.q.reshape(out.shape), self.sums.reshape(*out.shape[:2], *self.sums.shape[-2:])
        bias, weight = self.projection[0], self.projection[1:] - self.projection[0]
        for heads in heads_at_once(q):
            both = self.feature(q[:, heads].to(sums.dtype)) @ sums[:, heads]  # [B, heads, n_local, D + 1]
            linear = both[..., :-1] / (both[..., -1:] + 1e-5)
            added = torch.addmm(bias, linear.flatten(0, 2), weight).view_as(linear)
            out[:, heads] += added.masked_fill_(~self.real[:, None], 0.0)


def heads_at_once(tokens: torch.Tensor) -> list[slice]:
    """Returns slices of the heads of [B, H, n, D] with about `ELEMENTS_AT_ONCE` elements each."""
    batch, heads, count, head_dim = tokens.shape
    together = max(1, ELEMENTS_AT_ONCE // max(1, batch * count * head_dim))
    return [slice(first, first + together) for first in range(0, heads, together)]
