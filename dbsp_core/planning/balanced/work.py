"""Where work falls in Eq. 1: (rank, slot) cells and (period, rank) work, and the share of each part of a head.

numpy alone. In period p, ring rank r computes with slot (r + p) mod y, and r = rank // x.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

__all__ = ["HeadShards", "RingSchedule", "head_shards"]


@dataclass(frozen=True)
class RingSchedule:
    """Which rank computes with which slot in which period, for `ulysses` · `ring` ranks."""

    ulysses: int
    ring: int

    @property
    def world(self) -> int:
        return self.ulysses * self.ring

    @cached_property
    def slot(self) -> np.ndarray:
        """int64[y, y]: the slot that (ring rank, period) computes with."""
        return (np.arange(self.ring)[:, None] + np.arange(self.ring)) % self.ring

    @cached_property
    def period(self) -> np.ndarray:
        """int64[y, P]: the period in which (slot, rank) meet."""
        return (np.arange(self.ring)[:, None] - np.arange(self.world) // self.ulysses) % self.ring


@dataclass(frozen=True, eq=False)
class HeadShards:
    """The rows of one head in one Ulysses column are a part; a whole head is one part.

    head, column: int64[parts]
    work:         int64[parts, y, y], dense blocks by (ring rank, period) while rows are at their home ring rank
    """

    head: np.ndarray
    column: np.ndarray
    work: np.ndarray

    @cached_property
    def whole(self) -> np.ndarray:
        """bool[parts]: whether the part is all of its head."""
        return np.bincount(self.head)[self.head] == 1

    def work_by_rank(self, column: np.ndarray, ulysses: int) -> np.ndarray:
        """int64[y, P]: dense blocks by (period, rank), with part i in `column`[i]."""
        ring = self.work.shape[1]
        by_column = np.zeros((ulysses, ring, ring), dtype=np.int64)
        np.add.at(by_column, column, self.work)
        return by_column.transpose(2, 1, 0).reshape(ring, ring * ulysses)


def head_shards(cells: np.ndarray, column: np.ndarray, q_home: np.ndarray, periods: RingSchedule) -> HeadShards:
    """Sums rows that share a head, a column and a home ring rank.

    cells: int[H, nq, y];  column: int[H, nq];  q_home: int[nq] or [H, nq]
    """
    present = np.zeros((len(cells), periods.ulysses), dtype=bool)
    present[np.arange(len(cells))[:, None], column] = True
    head, part_column = np.nonzero(present)
    at_home = (np.arange(periods.ring)[:, None] == q_home[..., None, :]).astype(np.float64)
    by_slot = (at_home @ cells.astype(np.float64))[head]  # sums of integers below 2**53: exact
    for part in np.flatnonzero(present.sum(axis=1)[head] > 1):
        mine = column[head[part]] == part_column[part]
        here = at_home if at_home.ndim == 2 else at_home[head[part]]
        by_slot[part] = (here * mine) @ cells[head[part]].astype(np.float64)
    by_period = np.take_along_axis(by_slot, periods.slot[None], axis=2)
    return HeadShards(head, part_column, by_period.astype(np.int64))
