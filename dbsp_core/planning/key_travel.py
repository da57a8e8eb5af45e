"""How keys and values reach the rows: all of them in slots round the ring, or to each rank those that it needs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import numpy as np

from dbsp_core.masks.block_mask import BlockMask
from dbsp_core.masks.mask_counts import MaskCounts
from dbsp_core.planning.imbalance import owned_work
from dbsp_core.planning.row_owners import RowOwners, places_of
from dbsp_core.utils.errors import UserError, did_you_mean

__all__ = ["KEYS", "KeyTravel", "NeededKeys", "RingKeys", "require_keys"]


@dataclass(frozen=True, eq=False, repr=False)
class KeyTravel(ABC):
    """One way for keys and values to travel. With the owners of rows it makes an assignment.

    A rank's kernel runs once a period, with the KV blocks that are there. Those of the first `exchanges` periods come
    from where they live, each period's in one all-to-all; those of later periods are handed on by a ring neighbour.

    Attributes:
        name: Its value of the setting `keys`.
        planner: Name of the planner that cuts rows where "dbsp" is set.
        known_masks: Whether masks must be known before the call, as what is sent follows from them. The layout is then
            searched by them too, where none is set.
        lockstep: Whether ranks wait for one another in every period; else only the sum of a rank's periods must be
            even.
        slot: int64[H, nk], ring rank of each (head, KV block): where it is in the first period, if it travels then.
    """

    name: ClassVar[str]
    planner: ClassVar[str]
    known_masks: ClassVar[bool]
    lockstep: ClassVar[bool]

    slot: np.ndarray

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {len(self.slot)} heads of {self.slot.shape[1]} blocks>"

    @classmethod
    def planner_for(cls, name: str) -> str:
        """The name of the planner that cuts rows where `name` is set."""
        return cls.planner if name == "dbsp" else name

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

    @property
    def chunked(self) -> bool:
        """Whether there are several chunks, which `in_chunks` can change."""
        return False

    def in_chunks(self, shares: tuple[int, ...], one_ahead: bool = False) -> KeyTravel:
        """The same keys in other chunks, see `NeededKeys`. Raises ValueError where they do not come in chunks."""
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

    @abstractmethod
    def extra(self, rows: RowOwners) -> float:
        """Keys and values sent to more ranks than one of each ring row, as a share of all queries, keys and values."""

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

    def extra(self, rows: RowOwners) -> float:
        return int((rows.head_ulysses_ranks.sum(axis=1) - 1).clip(min=0).sum()) * 2 / (3 * rows.heads)

    def serves(self, rows: RowOwners, mask: BlockMask) -> bool:
        return True

    @property
    def sends_all(self) -> bool:
        return True

    def identity(self) -> tuple[Any, ...]:
        return (self.slot.astype(np.uint16),)  # no more ranks than that, and a quarter of the bytes


@dataclass(frozen=True, eq=False, repr=False)
class NeededKeys(KeyTravel):
    """Each rank is sent the keys that its rows need, and no others (as DSV does, Tan et al. 2025, §5.2).

    They come in chunks, first those whose slot is the rank's ring rank, which are in its ring row already, then parts
    of all others. It serves masks that need no further keys.

    Attributes:
        needed: bool[P, H, nk], the (head, KV block) pairs that each rank's rows need.
        ulysses: x.
        shares: Of the needed keys that are in other ring rows, how much comes in each further chunk, in relation to
            one another: (4, 3, 1) are three, the first with half of them. Without a ring there are none.
        one_ahead: Whether each chunk is fetched during the kernel on the one before it, which takes least memory; else
            all are from before the first kernel on.
    """

    name = "needed"
    planner = "local"
    known_masks = True
    lockstep = False

    needed: np.ndarray
    ulysses: int
    shares: tuple[int, ...] = (1,)
    one_ahead: bool = False

    @classmethod
    def of(cls, rows: RowOwners, slot: np.ndarray, mask: BlockMask) -> NeededKeys:
        return cls(slot, _needed_by(rows, mask), rows.strategy.ulysses)

    def in_chunks(self, shares: tuple[int, ...], one_ahead: bool = False) -> NeededKeys:
        return replace(self, shares=shares, one_ahead=one_ahead)

    @property
    def chunked(self) -> bool:
        return self.periods > 1

    @property
    def periods(self) -> int:
        return 1 if len(self.needed) == self.ulysses else 1 + len(self.shares)

    @property
    def exchanges(self) -> int:
        return self.periods

    @property
    def at_once(self) -> bool:
        return not self.one_ahead

    @cached_property
    def chunks(self) -> tuple[np.ndarray, ...]:
        """bool[P, H, nk] for each period, the keys that come for it."""
        if self.periods == 1:
            return (self.needed,)
        in_its_row = self.slot == np.arange(len(self.needed))[:, None, None] // self.ulysses
        others, chunk = self.needed & ~in_its_row, self._further_chunk
        return self.needed & in_its_row, *(others & (chunk == n) for n in range(len(self.shares)))

    @property
    def _further_chunk(self) -> np.ndarray:
        """int64[H, nk]: in which of the further chunks each KV block comes to other ring rows, from 0 on.

        Runs of x blocks in turn, which are striped over the ranks of a ring row, from head to head one run later: so
        that every rank gets and sends about as much of a chunk as any other.
        """
        block, head = np.arange(self.slot.shape[1]), np.arange(len(self.slot))[:, None]
        chunks = np.repeat(np.arange(len(self.shares)), self.shares)
        place = np.concatenate([(np.arange(share) + 0.5) / share for share in self.shares])
        in_turn = chunks[np.argsort(place, kind="stable")]  # (3, 1): 0, 0, 1, 0
        return in_turn[(block // self.ulysses + head) % len(in_turn)]

    def blocks_by_period(self, rows: RowOwners, rank: int) -> list[tuple[np.ndarray, np.ndarray]]:
        return [places_of(chunk[rank]) for chunk in self.chunks]

    def holders(self, rows: RowOwners, exchange: int, heads: np.ndarray, blocks: np.ndarray) -> np.ndarray:
        needed = self.chunks[exchange][:, heads][:, :, blocks].transpose(1, 2, 0)
        return np.where(needed, np.arange(len(self.needed)), -1)

    def copies(self, rows: RowOwners, heads: np.ndarray) -> Sequence[np.ndarray]:
        narrow = np.uint8 if len(heads) < 256 else np.uint16  # the narrower, the faster
        return [np.add.reduce(chunk[:, heads], axis=1, dtype=narrow) for chunk in self.chunks]

    def all_blocks(self, rows: RowOwners, exchanged: np.ndarray) -> np.ndarray:
        return exchanged

    def work(self, rows: RowOwners, counts: MaskCounts) -> np.ndarray:
        of_key = counts.columns_by_rank(rows.q_owner, len(self.needed))
        return np.stack([np.where(chunk, of_key, 0).sum(axis=(1, 2), dtype=np.int64) for chunk in self.chunks])

    def extra(self, rows: RowOwners) -> float:
        """Share of keys that are sent to more ranks than the first that needs them."""
        length = rows.grid.k_axis.lengths
        extra = int((self.needed.sum(axis=0) - 1).clip(min=0).sum(axis=0) @ length)
        return extra * 2 / (3 * rows.heads * rows.grid.tokens)

    def serves(self, rows: RowOwners, mask: BlockMask) -> bool:
        return not (_needed_by(rows, mask) & ~self.needed).any()

    @property
    def sends_all(self) -> bool:
        return bool(self.needed.any(axis=0).all())

    def identity(self) -> tuple[Any, ...]:
        return self.slot.astype(np.uint16), np.packbits(self.needed), np.array([*self.shares, self.one_ahead])


KEYS: dict[str, type[KeyTravel]] = {way.name: way for way in (RingKeys, NeededKeys)}
"""The ways for keys to travel, by the value of setting `keys`."""


def require_keys(keys: str) -> type[KeyTravel]:
    """The way of that name. Raises UserError for what is not one of `KEYS`."""
    if keys not in KEYS:
        known = f"use one of {', '.join(KEYS)}" + did_you_mean(keys, KEYS)
        reason = "auto weighs predicted times, which sessions and dbsp simulate know; " if keys == "auto" else ""
        raise UserError(f"keys cannot be {keys!r} here: {reason}{known}")
    return KEYS[keys]


def _needed_by(rows: RowOwners, mask: BlockMask) -> np.ndarray:
    """bool[P, H, nk]: the (head, KV block) pairs that some row of each rank attends to. Reads the mask on the host."""
    return mask.counts.columns_by_rank(rows.q_owner, rows.strategy.world) > 0
