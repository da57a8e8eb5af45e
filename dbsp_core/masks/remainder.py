"""What a mask may have beside its bits, so that skipped blocks are not simply left out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dbsp_core.masks.grid import BlockGrid
from dbsp_core.utils.errors import UserError

__all__ = ["NO_GRADIENTS", "CoarseBranch", "PooledKeys", "Remainder", "packed_remainder"]

NO_GRADIENTS = (
    "gradients do not flow through what a mask adds for skipped blocks (pooled keys, a coarse branch); turn that off "
    "in the mask source, or call attention under torch.no_grad()"
)


@dataclass(frozen=True)
class PooledKeys:
    """Rows also attend to each block that they skip, as one key: the mean of its keys, with the mean of its values.

    Its score counts as often as the block has tokens: ln(tokens) is added to it. Rows skip blocks of their own
    sequence only. (Sol-Attn, arXiv 2607.24027: as if all keys of a skipped block were alike.)
    """

    def require_fit(self, grid: BlockGrid) -> None:
        """Raises UserError for a grid in which blocks are other tokens in other heads."""
        if grid.common_order is None:
            raise UserError(
                "keys of skipped blocks are pooled in one token order for all heads, and this mask has several; give "
                "all heads one order, or leave pooled keys out"
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

    def require_fit(self, grid: BlockGrid) -> None:
        """It was made for the mask's grid."""

    def add_to(self, out: torch.Tensor) -> None:
        """Adds it to [B, H, n_local, D], or [1, B · H, n_local, D], at home."""
        gate, coarse = (one.reshape(*out.shape[:2], *one.shape[-2:]) for one in (self.gate, self.coarse))
        added = gate * coarse.index_select(2, self.block)
        out.add_(added.masked_fill_(~self.real[:, None], 0.0))


Remainder = PooledKeys | CoarseBranch


def packed_remainder(remainders: Sequence[Remainder | None]) -> Remainder | None:
    """That of masks which are packed into one. Raises UserError where they differ, or are coarse branches."""
    first, *others = remainders
    if any(isinstance(one, CoarseBranch) for one in remainders):
        raise UserError("a coarse branch is of one sequence and is not packed; give the mask source coarse: false")
    if any(one != first for one in others):
        raise UserError(
            "sequences that are packed need the same remainder beside their masks; give all mask sources the same "
            "option"
        )
    return first
