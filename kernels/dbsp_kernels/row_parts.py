"""Rows that are cut by keys, as kernels take them, and the limits by which they are cut."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

LONG_ROW = 0.125  # Row share from which long rows are cut: the longest over a slot's share of the work
SHORT = 10  # Rows over a 10th of a slot's share start first, and the lightest 10th of the work last
LEAST_BLOCKS = 16  # of a part
SHARES = 32  # No limit is below a 32nd of a slot's share
PART_BLOCKS = 2  # What a part takes in addition to its blocks, in the time of a block


@dataclass(frozen=True, eq=False)
class RowParts:
    """Rows of which long ones are cut by keys, in the order in which they start.

    Attributes:
        items: int32[n, 5], a whole row or a part of one each: the row, the first entry of its list, how many entries,
            how many of these are blocks of all tokens, and the place of its result, −1 for a whole row. Where the row
            is −1, an item is not used.
        cuts: int32[E, 3], the rows that are cut: the row, the place of its first part, and how many parts it has. With
            0 parts, a cut is not used.
    """

    items: torch.Tensor
    cuts: torch.Tensor

    @property
    def places(self) -> int:
        """Number of places for the parts' results: twice as many as parts can be added."""
        return 2 * self.cuts.shape[0]


def most_added_parts(slots: int) -> int:
    """Returns E, how many parts cutting can add, whatever the rows: Σ (parts − 1) ≤ Σ blocks / limit.

    With limit = max(rest / slots, total / (32 · slots)) this is at most slots · (1 + ∫ dx / x from 1 / 32 to 1).
    """
    return math.ceil(slots * (1 + math.log(SHARES)))
