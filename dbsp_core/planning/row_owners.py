"""Which rank computes which rows."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from dbsp_core.layout.strategy import Strategy
from dbsp_core.masks.grid import BlockGrid

__all__ = ["RowOwners", "places_of"]


@dataclass(frozen=True, eq=False)
class RowOwners:
    """The rank of each row.

    Attributes:
        q_owner: int64[H, nq], rank of each (head, query block).
    """

    strategy: Strategy
    grid: BlockGrid
    q_owner: np.ndarray

    @property
    def heads(self) -> int:
        return len(self.q_owner)

    @cached_property
    def head_ulysses_ranks(self) -> np.ndarray:
        """bool[H, x]: the Ulysses ranks in which each head has rows, hence needs its keys and values."""
        ranks = np.zeros((self.heads, self.strategy.ulysses), dtype=bool)
        ranks[np.arange(self.heads)[:, None], self.q_owner % self.strategy.ulysses] = True
        return ranks

    @property
    def split_heads(self) -> int:
        """Heads whose rows are in more than one Ulysses rank."""
        return int((self.head_ulysses_ranks.sum(axis=1) > 1).sum())

    def rows_of(self, rank: int) -> tuple[np.ndarray, np.ndarray]:
        """(head, query block) of the rows that `rank` computes, int64[Rq] each, in packing order."""
        return places_of(self.q_owner == rank)


def places_of(chosen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """`np.nonzero` of bool[H, n], which takes several times as long in two dimensions as in one."""
    head, block = np.divmod(np.flatnonzero(chosen), chosen.shape[1])
    return head, block
