"""What a plan assigns: an owner to each row, a ring slot to each block of keys and values."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from dbsp_core.layout.strategy import Strategy
from dbsp_core.masks.block_mask import MaskCounts
from dbsp_core.masks.grid import BlockGrid
from dbsp_core.planning.imbalance import owned_work

__all__ = ["Assignment"]


@dataclass(frozen=True, eq=False)
class Assignment:
    """Which rank computes each row, and in which ring slot each KV block travels; for any mask of its grid.

    q_owner: int64[H, nq], rank of each (head, query block)
    kv_slot: int64[H, nk], ring slot of each (head, KV block)
    """

    strategy: Strategy
    grid: BlockGrid
    q_owner: np.ndarray
    kv_slot: np.ndarray

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

    @property
    def extra_kv(self) -> float:
        """K and V elements sent more than once, to further Ulysses ranks of split heads, as a share of all Q, K, V."""
        return int((self.head_ulysses_ranks.sum(axis=1) - 1).clip(min=0).sum()) * 2 / (3 * self.heads)

    @cached_property
    def fingerprint(self) -> int:
        """63 bits that differ between assignments: equal on all ranks or the job would hang or be wrong."""
        digest = hashlib.blake2b(str((self.strategy, self.grid)).encode(), digest_size=8)
        digest.update(self.q_owner.astype(np.uint16).tobytes())  # no more ranks than that, and a quarter of the bytes
        digest.update(self.kv_slot.astype(np.uint16).tobytes())
        return int.from_bytes(digest.digest(), "big") >> 1

    def equals(self, other: Assignment) -> bool:
        """Whether both send the same pieces to the same ranks."""
        return self is other or (
            (self.strategy, self.grid) == (other.strategy, other.grid)
            and np.array_equal(self.q_owner, other.q_owner)
            and np.array_equal(self.kv_slot, other.kv_slot)
        )

    def work(self, counts: MaskCounts) -> np.ndarray:
        """int64[y, P]: b(i, g) of Eq. 1, dense blocks by (ring step, rank). counts: of a mask of this grid"""
        by_slot = counts.work_by_slot(self.kv_slot, self.strategy.ring)
        return owned_work(self.q_owner, by_slot, self.strategy.ulysses)

    def rows_of(self, rank: int) -> tuple[np.ndarray, np.ndarray]:
        """(head, query block) of the rows that `rank` computes, int64[Rq] each, in packing order."""
        return _places_of(self.q_owner == rank)

    def slot_blocks(self, slot: int, ulysses_rank: int) -> tuple[np.ndarray, np.ndarray]:
        """(head, KV block) of what travels in `slot` to `ulysses_rank`, int64[Ck] each, as packed."""
        return _places_of((self.kv_slot == slot) & self.head_ulysses_ranks[:, ulysses_rank, None])

    def blocks_by_slot(self, ulysses_rank: int) -> list[tuple[np.ndarray, np.ndarray]]:
        """`slot_blocks` of all slots, in one pass."""
        wanted = np.flatnonzero(np.repeat(self.head_ulysses_ranks[:, ulysses_rank], self.kv_slot.shape[1]))
        slot = self.kv_slot.reshape(-1)[wanted].astype(np.uint16)  # sorted by radix
        sizes = np.bincount(slot, minlength=self.strategy.ring)
        in_order = wanted[np.argsort(slot, kind="stable")]
        pieces = np.split(in_order, np.cumsum(sizes)[:-1])
        return [(piece // self.kv_slot.shape[1], piece % self.kv_slot.shape[1]) for piece in pieces]


def _places_of(chosen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """`np.nonzero` of bool[H, n], which takes several times as long in two dimensions as in one."""
    head, block = np.divmod(np.flatnonzero(chosen), chosen.shape[1])
    return head, block
