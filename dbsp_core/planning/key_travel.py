"""How keys and values reach the rows: what every way must say, and the way round the ring."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from dbsp_core.masks.block_mask import BlockMask
from dbsp_core.masks.mask_counts import MaskCounts
from dbsp_core.planning.imbalance import owned_work
from dbsp_core.planning.row_owners import RowOwners

__all__ = ["KeyTravel", "RingKeys"]


@dataclass(frozen=True, eq=False, repr=False)
class KeyTravel(ABC):
    """One way for keys and values to travel. With the owners of rows it makes an assignment.

    A rank's kernel runs once a period, with the KV blocks that are there. Those of the first `exchanges` periods come
    from where they live, each period's in one all-to-all; those of later periods are handed on by a ring neighbour.

    Attributes:
        name: Its value of the setting `keys`.
        known_masks: Whether masks must be known before the call, as what is sent follows from them. Planner "dbsp"
            then cuts rows into runs of tokens, and the default layout is contiguous.
        lockstep: Whether ranks wait for one another in every period; else only the sum of a rank's periods must be
            even.
        slot: int64[H, nk], ring rank of each (head, KV block): where it is in the first period, if it travels then.
    """

    name: ClassVar[str]
    known_masks: ClassVar[bool]
    lockstep: ClassVar[bool]

    slot: np.ndarray

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {len(self.slot)} heads of {self.slot.shape[1]} blocks>"

    @classmethod
    @abstractmethod
    def of(cls, rows: RowOwners, slot: np.ndarray, mask: BlockMask) -> KeyTravel:
        """Returns these keys for one mask, on the grid of the rows."""

    @property
    @abstractmethod
    def periods(self) -> int:
        """How often a rank's kernel runs."""

    @property
    @abstractmethod
    def exchanges(self) -> int:
        """How many of the first periods' keys come from where they live."""

    @property
    @abstractmethod
    def at_once(self) -> bool:
        """Whether all exchanges start before the first kernel; else each during the kernel before it."""

    def in_chunks(self, shares: tuple[int, ...], one_ahead: bool = False) -> KeyTravel:
        """The same keys in other chunks, see `KeysInChunks`. Raises ValueError where they do not come in chunks."""
        raise ValueError(f"{self!r} do not come in chunks")

    @abstractmethod
    def blocks_by_period(self, rows: RowOwners, rank: int) -> list[tuple[np.ndarray, np.ndarray]]:
        """(head, KV block) of what `rank` computes with in each period, int64[Ck] each, as packed."""

    @abstractmethod
    def holders(self, rows: RowOwners, exchange: int, heads: np.ndarray, blocks: np.ndarray) -> np.ndarray:
        """int64[heads, blocks, most]: the ranks that KV blocks are sent to in an exchange, filled up with -1."""

    @abstractmethod
    def copies(self, rows: RowOwners, heads: np.ndarray) -> Sequence[np.ndarray]:
        """Yields for each exchange number[P, nk]: how many of these heads each rank gets each KV block of."""

    @abstractmethod
    def all_blocks(self, rows: RowOwners, exchanged: np.ndarray) -> np.ndarray:
        """int64[periods, P], KV blocks that each rank computes with, from exchanged int64[exchanges, P] of them."""

    @abstractmethod
    def work(self, rows: RowOwners, counts: MaskCounts) -> np.ndarray:
        """int64[periods, P]: b(i, g) of Eq. 1, dense blocks by (period, rank), of the rows' mask with these counts."""

    def extra(self, rows: RowOwners) -> float:
        """Keys and values sent to more ranks than one of each ring row, as a share of all queries, keys and values."""
        return int((rows.head_ulysses_ranks.sum(axis=1) - 1).clip(min=0).sum()) * 2 / (3 * rows.heads)

    @abstractmethod
    def serves(self, rows: RowOwners, mask: BlockMask) -> bool:
        """Whether all keys that a mask of the rows' grid needs are sent."""

    @property
    @abstractmethod
    def sends_all(self) -> bool:
        """Whether every KV block is sent to some rank."""

    @abstractmethod
    def identity(self) -> tuple[Any, ...]:
        """What tells it from others of its kind: arrays, and values that can be compared."""

    def equals(self, other: KeyTravel) -> bool:
        return type(self) is type(other) and all(
            np.array_equal(one, another) for one, another in zip(self.identity(), other.identity(), strict=True)
        )


@dataclass(frozen=True, eq=False, repr=False)
class RingKeys(KeyTravel):
    """All keys, in slots that go round the ring (paper §2.3): in ring step i, ring rank r has slot (r + i) mod y.

    Attributes:
        ring: y.
    """

    name = "ring"
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
