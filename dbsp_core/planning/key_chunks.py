"""Keys and values that each rank is sent in chunks, from where they live: all of its heads', or those it needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from dbsp_core.masks.block_mask import BlockMask
from dbsp_core.masks.mask_counts import MaskCounts
from dbsp_core.planning.imbalance import owned_work
from dbsp_core.planning.key_travel import KeyTravel, RingKeys
from dbsp_core.planning.row_owners import RowOwners, places_of
from dbsp_core.utils.errors import UserError, did_you_mean
from dbsp_core.utils.removed import why_removed

__all__ = ["KEYS", "AllKeys", "KeysInChunks", "NeededKeys", "needed_by", "require_keys"]


@dataclass(frozen=True, eq=False, repr=False)
class KeysInChunks(KeyTravel):
    """Each rank is sent keys in chunks, each in one all-to-all from where they live.

    First come those whose slot is the rank's ring rank, which are in its ring row already, then parts of all others.
    Ranks do not wait for one another: only the sum of a rank's work must be even.

    Attributes:
        sent: bool[P, H, nk], the (head, KV block) pairs that each rank is sent.
        ulysses: x.
        shares: Of the keys that come from other ring rows, how much comes in each further chunk, in relation to
            one another: (4, 3, 1) are three, the first with half of them. Without a ring there are none.
        one_ahead: Whether each chunk is fetched during the kernel on the one before it, which takes least memory; else
            all are from before the first kernel on.
    """

    lockstep = False

    sent: np.ndarray
    ulysses: int
    shares: tuple[int, ...] = (2, 1)
    one_ahead: bool = False

    def in_chunks(self, shares: tuple[int, ...], one_ahead: bool = False) -> KeysInChunks:
        return replace(self, shares=shares, one_ahead=one_ahead)

    @property
    def chunked(self) -> bool:
        return len(self.sent) > self.ulysses

    @property
    def periods(self) -> int:
        return 1 + len(self.shares) if self.chunked else 1

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
            return (self.sent,)
        in_its_row = self.slot == np.arange(len(self.sent))[:, None, None] // self.ulysses
        others, chunk = self.sent & ~in_its_row, self._further_chunk
        return self.sent & in_its_row, *(others & (chunk == n) for n in range(len(self.shares)))

    @property
    def _further_chunk(self) -> np.ndarray:
        """int64[H, nk]: in which of the further chunks each KV block comes to other ring rows, from 0 on.

        Runs of x blocks in turn, which are striped over the ranks of a ring row, from head to head one run later: so
        that every rank gets and sends about as much of a chunk as any other.
        """
        chunks = np.repeat(np.arange(len(self.shares)), self.shares)
        middle = np.concatenate([(np.arange(share) + 0.5) / share for share in self.shares])
        in_turn = chunks[np.argsort(middle, kind="stable")]  # (3, 1): 0, 0, 1, 0
        return in_turn[(self._turns // self.ulysses + np.arange(len(self.slot))[:, None]) % len(in_turn)]

    @property
    def _turns(self) -> np.ndarray:
        """int64[H or 1, nk]: the order of blocks in which chunks take turns: here their own."""
        return np.arange(self.slot.shape[1])[None]

    def blocks_by_period(self, rows: RowOwners, rank: int) -> list[tuple[np.ndarray, np.ndarray]]:
        return [places_of(chunk[rank]) for chunk in self.chunks]

    def holders(self, rows: RowOwners, exchange: int, heads: np.ndarray, blocks: np.ndarray) -> np.ndarray:
        sent = self.chunks[exchange][:, heads][:, :, blocks].transpose(1, 2, 0)
        return np.where(sent, np.arange(len(self.sent)), -1)

    def copies(self, rows: RowOwners, heads: np.ndarray) -> Sequence[np.ndarray]:
        narrow = np.uint8 if len(heads) < 256 else np.uint16  # the narrower, the faster
        return [np.add.reduce(chunk[:, heads], axis=1, dtype=narrow) for chunk in self.chunks]

    def all_blocks(self, rows: RowOwners, exchanged: np.ndarray) -> np.ndarray:
        return exchanged

    @property
    def sends_all(self) -> bool:
        return bool(self.sent.any(axis=0).all())


@dataclass(frozen=True, eq=False, repr=False)
class AllKeys(KeysInChunks):
    """All keys of the heads of which a rank has rows, whatever the mask.

    Finer pieces than a ring's slots hide better behind kernels, and periods need not be even.
    """

    name = "all"
    known_masks = False

    @classmethod
    def of(cls, rows: RowOwners, slot: np.ndarray, mask: BlockMask) -> AllKeys:
        column = np.arange(rows.strategy.world) % rows.strategy.ulysses
        sent = np.repeat(rows.head_ulysses_ranks.T[column][..., None], slot.shape[1], axis=2)
        return cls(slot, sent, rows.strategy.ulysses)

    @property
    def _turns(self) -> np.ndarray:
        """Turns that go through one slot after the other, as ring rows may have stripes."""
        order = np.argsort(self.slot.astype(np.uint16), axis=1, kind="stable")
        turns = np.empty_like(order)
        np.put_along_axis(turns, order, np.arange(order.shape[1])[None], axis=1)
        return turns

    def work(self, rows: RowOwners, counts: MaskCounts) -> np.ndarray:
        """See `KeyTravel.work`. Counted where the mask's bits are, by the slot and the further chunk of each block."""
        world, ring, further = rows.strategy.world, rows.strategy.ring, len(self.shares)
        if ring == 1:
            return owned_work(rows.q_owner, counts.rows[..., None], self.ulysses)
        cells = counts.work_by_slot(self.slot * further + self._further_chunk, ring * further)
        of_cell = (cells[..., cell].ravel() for cell in range(ring * further))
        by_rank = np.stack([np.bincount(rows.q_owner.ravel(), one, world) for one in of_cell], axis=1).astype(np.int64)
        by_slot = by_rank.reshape(world, ring, further)
        own = by_slot[np.arange(world), np.arange(world) // self.ulysses]
        return np.concatenate([own.sum(axis=1)[None], (by_slot.sum(axis=1) - own).T])

    def serves(self, rows: RowOwners, mask: BlockMask) -> bool:
        return True

    def identity(self) -> tuple[Any, ...]:
        return self.slot.astype(np.uint16), np.array([*self.shares, self.one_ahead])


@dataclass(frozen=True, eq=False, repr=False)
class NeededKeys(KeysInChunks):
    """The keys that a rank's rows need, and no others (as DSV does, Tan et al. 2025, §5.2).

    It serves masks that need no further keys.
    """

    name = "needed"
    known_masks = True

    @classmethod
    def of(cls, rows: RowOwners, slot: np.ndarray, mask: BlockMask) -> NeededKeys:
        return cls(slot, needed_by(rows, mask), rows.strategy.ulysses)

    def work(self, rows: RowOwners, counts: MaskCounts) -> np.ndarray:
        of_key = counts.columns_by_rank(rows.q_owner, len(self.sent))
        return np.stack([np.where(chunk, of_key, 0).sum(axis=(1, 2), dtype=np.int64) for chunk in self.chunks])

    def extra(self, rows: RowOwners) -> float:
        """Share of keys that are sent to more ranks than the first that needs them."""
        length = rows.grid.k_axis.lengths
        extra = int((self.sent.sum(axis=0) - 1).clip(min=0).sum(axis=0) @ length)
        return extra * 2 / (3 * rows.heads * rows.grid.tokens)

    def serves(self, rows: RowOwners, mask: BlockMask) -> bool:
        return not (needed_by(rows, mask) & ~self.sent).any()

    def identity(self) -> tuple[Any, ...]:
        return self.slot.astype(np.uint16), np.packbits(self.sent), np.array([*self.shares, self.one_ahead])


def needed_by(rows: RowOwners, mask: BlockMask) -> np.ndarray:
    """bool[P, H, nk]: the (head, KV block) pairs that some row of each rank attends to. Reads the mask on the host."""
    return mask.counts.columns_by_rank(rows.q_owner, rows.strategy.world) > 0


KEYS: dict[str, type[KeyTravel]] = {way.name: way for way in (RingKeys, AllKeys, NeededKeys)}
"""The ways for keys to travel, by the value of setting `keys`."""


def require_keys(keys: str) -> type[KeyTravel]:
    """Returns the way of that name. Raises UserError for a value that is not one of `KEYS`."""
    if keys not in KEYS:
        unknown = f"keys cannot be {keys!r}; use one of {', '.join(KEYS)}" + did_you_mean(keys, KEYS)
        raise UserError(why_removed("keys", keys) or unknown)
    return KEYS[keys]
