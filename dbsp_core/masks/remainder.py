"""What a mask may have beside its bits, so that skipped blocks are not simply left out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dbsp_core.masks.grid import BlockGrid
from dbsp_core.utils.errors import UserError

__all__ = ["NO_GRADIENTS", "PooledKeys", "Remainder", "packed_remainder"]

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


Remainder = PooledKeys


def packed_remainder(remainders: Sequence[Remainder | None]) -> Remainder | None:
    """That of masks which are packed into one. Raises UserError where they differ."""
    first, *others = remainders
    if any(one != first for one in others):
        raise UserError(
            "sequences that are packed need the same remainder beside their masks; give all mask sources the same "
            "option"
        )
    return first
