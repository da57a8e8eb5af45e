"""Keys and values that go round the ring."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dbsp_core.masks.block_mask import BlockMask
from dbsp_core.masks.mask_counts import MaskCounts
from dbsp_core.planning.imbalance import owned_work
from dbsp_core.planning.key_travel import KeyTravel
from dbsp_core.planning.row_owners import RowOwners

__all__ = ["RingKeys"]


@dataclass(frozen=True, eq=False, repr=False)
class RingKeys(KeyTravel):
    """All keys, in slots that go round the ring (paper §2.3): in ring step i, ring rank r has slot (r + i) mod y.

    Attributes:
        ring: y.
    """

    name = "ring"
    planner = "dbsp"
    known_masks = False
    lockstep = True

    ring: int

    @classmethod
    def of(cls, rows: RowOwners, slot: np.ndarray, mask: BlockMask) -> RingKeys:
        return cls(slot, rows.strategy.ring)

    @property
    def periods(self) -> int:
        return self.ring

    @property
    def exchanges(self) -> int:
        return 1

    @property
    def at_once(self) -> bool:
        return False

    def blocks_by_period(self, rows: RowOwners, rank: int) -> list[tuple[np.ndarray, np.ndarray]]:
        ring_rank, column = divmod(rank, rows.strategy.ulysses)
        wanted = np.flatnonzero(np.repeat(rows.head_ulysses_ranks[:, column], self.slot.shape[1]))
        step = (self.slot.reshape(-1)[wanted] - ring_rank) % self.ring
        step = step.astype(np.uint16)  # sorted by radix
        sizes = np.bincount(step, minlength=self.ring)
        pieces = np.split(wanted[np.argsort(step, kind="stable")], np.cumsum(sizes)[:-1])
        return [(piece // self.slot.shape[1], piece % self.slot.shape[1]) for piece in pieces]

    def holders(self, rows: RowOwners, exchange: int, heads: np.ndarray, blocks: np.ndarray) -> np.ndarray:
        """Returns the ranks that hold them in ring step 0: of the block's slot, one for each Ulysses rank in need."""
        ulysses = rows.strategy.ulysses
        ranks = self.slot[np.ix_(heads, blocks)][..., None] * ulysses + np.arange(ulysses)
        return np.where(rows.head_ulysses_ranks[heads][:, None, :], ranks, -1)

    def copies(self, rows: RowOwners, heads: np.ndarray) -> Sequence[np.ndarray]:
        head, column = np.nonzero(rows.head_ulysses_ranks[heads])
        rank, blocks = self.slot[heads][head] * rows.strategy.ulysses + column[:, None], self.slot.shape[1]
        flat = (rank * blocks + np.arange(blocks)).ravel()
        count = np.bincount(flat, minlength=rows.strategy.world * blocks)
        return [count.reshape(rows.strategy.world, blocks).astype(np.float64)]

    def all_blocks(self, rows: RowOwners, exchanged: np.ndarray) -> np.ndarray:
        by_slot = exchanged.reshape(self.ring, rows.strategy.ulysses)
        return np.stack([np.roll(by_slot, -step, axis=0).ravel() for step in range(self.ring)])

    def work(self, rows: RowOwners, counts: MaskCounts) -> np.ndarray:
        return owned_work(rows.q_owner, counts.work_by_slot(self.slot, self.ring), rows.strategy.ulysses)

    def serves(self, rows: RowOwners, mask: BlockMask) -> bool:
        return True

    @property
    def sends_all(self) -> bool:
        return True

    def identity(self) -> tuple[Any, ...]:
        return (self.slot.astype(np.uint16),)  # no more ranks than that, and a quarter of the bytes
