"""Sums of work as Eq. 1 needs them: by (rank, slot), by (ring step, rank), and by part of a head. Only numpy.

In ring step p, ring rank r computes with slot (r + p) mod y, and r = rank // x.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

__all__ = ["HeadShards", "RingSchedule", "head_shards"]


@dataclass(frozen=True)
class RingSchedule:
    """The slot that each rank computes with in each ring step, for x·y = `ulysses`·`ring` ranks."""

    ulysses: int
    ring: int

    @property
    def world(self) -> int:
        return self.ulysses * self.ring

    @cached_property
    def slot(self) -> np.ndarray:
        """int64[y, y]: the slot that (ring rank, ring step) computes with."""
        return (np.arange(self.ring)[:, None] + np.arange(self.ring)) % self.ring

    @cached_property
    def ring_step(self) -> np.ndarray:
        """int64[y, P]: the ring step in which (slot, rank) meet."""
        return (np.arange(self.ring)[:, None] - np.arange(self.world) // self.ulysses) % self.ring


@dataclass(frozen=True, eq=False)
class HeadShards:
    """Work of the parts of heads: a part is the rows of one head in one Ulysses rank, a whole head is one part.

    Attributes:
        head: int64[parts].
        ulysses_rank: int64[parts].
        work: int64[parts, y, y], dense blocks by (ring rank, ring step) while rows are at their home ring rank.
    """

    head: np.ndarray
    ulysses_rank: np.ndarray
    work: np.ndarray

    @cached_property
    def is_unsplit(self) -> np.ndarray:
        """bool[parts]: whether the part is all of its head."""
        return np.bincount(self.head)[self.head] == 1

    def work_by_rank(self, ulysses_rank: np.ndarray, ulysses: int) -> np.ndarray:
        """int64[y, P]: dense blocks by (ring step, rank), with part i in `ulysses_rank`[i]."""
        ring = self.work.shape[1]
        by_ulysses_rank = np.zeros((ulysses, ring, ring), dtype=np.int64)
        np.add.at(by_ulysses_rank, ulysses_rank, self.work)
        return by_ulysses_rank.transpose(2, 1, 0).reshape(ring, ring * ulysses)


def head_shards(
    work_by_slot: np.ndarray, ulysses_rank: np.ndarray, q_home: np.ndarray, schedule: RingSchedule
) -> HeadShards:
    """Sums the rows of int[H, nq, y] that share a head, a Ulysses rank and a home ring rank."""
    present = np.zeros((len(work_by_slot), schedule.ulysses), dtype=bool)
    present[np.arange(len(work_by_slot))[:, None], ulysses_rank] = True
    head, part_rank = np.nonzero(present)
    at_home = (np.arange(schedule.ring)[:, None] == q_home[..., None, :]).astype(np.float64)
    by_slot = (at_home @ work_by_slot.astype(np.float64))[head]  # sums of integers below 2**53: exact
    for part in np.flatnonzero(present.sum(axis=1)[head] > 1):
        mine = ulysses_rank[head[part]] == part_rank[part]
        here = at_home if at_home.ndim == 2 else at_home[head[part]]
        by_slot[part] = (here * mine) @ work_by_slot[head[part]].astype(np.float64)
    by_ring_step = np.take_along_axis(by_slot, schedule.slot[None], axis=2)
    return HeadShards(head, part_rank, by_ring_step.astype(np.int64))
