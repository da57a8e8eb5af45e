"""Adds VSA's coarse branch to the output of block-sparse attention."""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["NO_GRADIENTS", "CoarseBranch"]

NO_GRADIENTS = (
    "gradients do not flow through a coarse branch; give the mask source coarse: false, or call attention under "
    "torch.no_grad()"
)


@dataclass(frozen=True, eq=False, repr=False)
class CoarseBranch:
    """Attention over pooled tokens, which is multiplied by a gate and added to the output at home.

    (Zhang et al., VSA: Faster Video Diffusion with Trainable Sparse Attention, arXiv 2505.13389, 2025, Eq. 3.)

    Attributes:
        coarse: float32[B · H, n, D], of the n query blocks of which this rank has tokens.
        block: int64[n_local], each place's among them.
        real: bool[n_local], whether there is a token.
        gate: [B, H, n_local, D].
    """

    coarse: torch.Tensor
    block: torch.Tensor
    real: torch.Tensor
    gate: torch.Tensor

    def __repr__(self) -> str:
        """The same on all ranks."""
        return "CoarseBranch()"

    def add_to(self, out: torch.Tensor) -> None:
        """Adds it to [B, H, n_local, D], or [1, B · H, n_local, D], at home."""
        gate, coarse = (one.reshape(*out.shape[:2], *one.shape[-2:]) for one in (self.gate, self.coarse))
        added = gate * coarse.index_select(2, self.block)
        out.add_(added.masked_fill_(~self.real[:, None], 0.0))
