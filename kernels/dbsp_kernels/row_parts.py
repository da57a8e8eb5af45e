"""Rows cut by keys, as passed to kernels, and the limits for cutting."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

LONG_ROW = 0.125  # cut rows if the longest exceeds this fraction of a slot's share of the work
SHORT = 10  # rows above 1/10 of a slot's share start first, the lightest 1/10 of the work last
LEAST_BLOCKS = 16  # fewest blocks of a part
SHARES = 32  # parts are at least 1/32 of a slot's share
PART_BLOCKS = 2  # overhead of a part, in units of a block's time


@dataclass(frozen=True, eq=False)
class RowParts:
    """Rows in the order in which they start, long ones cut by keys."""

    items: torch.Tensor
    """int32[n, 5], one whole row or part each: row (−1: unused item), first entry in the row's list, numbers of
    entries and of full blocks among them, and place of the result (−1 for a whole row)."""
    cuts: torch.Tensor  # int32[E, 3], one cut row each: row, place of its first part, number of parts (0: unused cut)

    @property
    def places(self) -> int:
        """Number of places for results of parts: twice the number of parts that cutting can add."""
        return 2 * self.cuts.shape[0]


def most_added_parts(slots: int) -> int:
    """Returns E, an upper bound on the parts that cutting adds: Σ (parts − 1) ≤ Σ blocks / limit.

    With limit = max(rest / slots, total / (32 · slots)) this is at most slots · (1 + ∫ dx / x from 1 / 32 to 1).
    """
    return math.ceil(slots * (1 + math.log(SHARES)))
