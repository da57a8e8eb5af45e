"""What a plan assigns: an owner to each row, a ring slot to each block of keys and values, and who needs it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from dbsp_core.layout.strategy import Strategy
from dbsp_core.masks.grid import BlockGrid
from dbsp_core.masks.mask_counts import MaskCounts
from dbsp_core.planning.imbalance import owned_work

__all__ = ["Assignment"]


@dataclass(frozen=True, eq=False, repr=False)
class Assignment:
    """Which rank computes each row, and in which ring slot each KV block travels; for any mask of its grid.

    Or, with `needed`, which KV blocks each rank is sent: no others travel, none in a ring. They come in chunks, first
    those whose slot is the rank's ring rank, which are in its ring row already, then parts of all others. Such an
    assignment serves masks that need no further keys.

    q_owner: int64[H, nq], rank of each (head, query block)
    kv_slot: int64[H, nk], ring slot of each (head, KV block)
    needed:  bool[P, H, nk], the (head, KV block) pairs that each rank's rows need; None: keys travel round the ring
    chunk_shares: of the needed keys that are in other ring rows, how much comes in each further chunk, in relation to
                one another: (4, 3, 1) are three, the first with half of them. Without a ring there are none
    one_ahead:  whether each chunk is fetched beside the kernel on the one before it, which takes least memory; else
                all set off before the first kernel
    """

    strategy: Strategy
    grid: BlockGrid
    q_owner: np.ndarray
    kv_slot: np.ndarray
    needed: np.ndarray | None = None
    chunk_shares: tuple[int, ...] = (1,)
    one_ahead: bool = False

    def __repr__(self) -> str:
        keys = "keys in a ring" if self.needed is None else "needed keys"
        return f"<Assignment {self.strategy} of {self.heads} heads of {self.grid.nq} × {self.grid.nk} blocks, {keys}>"

    @property
    def heads(self) -> int:
        return len(self.q_owner)

    @property
    def periods(self) -> int:
        """How often a rank's kernel runs: once for each ring slot, or each chunk of needed keys."""
        return self.strategy.ring if self.needed is None or self.strategy.ring == 1 else 1 + len(self.chunk_shares)

    @property
    def _further_chunk(self) -> np.ndarray:
        """int64[H, nk]: in which of the further chunks each KV block comes to other ring rows, from 0 on.

        Runs of x blocks in turn, which are striped over the ranks of a ring row, from head to head one run later: so
        that every rank gets and sends about as much of a chunk as any other.
        """
        block, head = np.arange(self.kv_slot.shape[1]), np.arange(self.heads)[:, None]
        chunks = np.repeat(np.arange(len(self.chunk_shares)), self.chunk_shares)
        place = np.concatenate([(np.arange(share) + 0.5) / share for share in self.chunk_shares])
        in_turn = chunks[np.argsort(place, kind="stable")]  # (3, 1): 0, 0, 1, 0
        return in_turn[(block // self.strategy.ulysses + head) % len(in_turn)]

    @cached_property
    def chunks(self) -> tuple[np.ndarray, ...]:
        """By chunk of needed keys bool[P, H, nk], what comes in it; () where keys travel round the ring."""
        if self.needed is None or self.periods == 1:
            return () if self.needed is None else (self.needed,)
        ring_rank = np.arange(self.strategy.world)[:, None, None] // self.strategy.ulysses
        in_its_row = self.kv_slot == ring_rank
        others, chunk = self.needed & ~in_its_row, self._further_chunk
        return self.needed & in_its_row, *(others & (chunk == n) for n in range(self.periods - 1))

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
        """K and V elements sent more than once, to further Ulysses ranks of split heads, as a share of all Q, K, V.

        Without a ring; of needed keys, what is sent to more than one rank.
        """
        if self.needed is not None:
            length = self.grid.k_axis.lengths
            extra = int((self.needed.sum(axis=0) - 1).clip(min=0).sum(axis=0) @ length)
            return extra * 2 / (3 * self.heads * self.grid.tokens)
        return int((self.head_ulysses_ranks.sum(axis=1) - 1).clip(min=0).sum()) * 2 / (3 * self.heads)

    @cached_property
    def fingerprint(self) -> int:
        """63 bits that differ between assignments: equal on all ranks or the job would hang or be wrong."""
        digest = hashlib.blake2b(str((self.strategy, self.grid)).encode(), digest_size=8)
        digest.update(self.q_owner.astype(np.uint16).tobytes())  # no more ranks than that, and a quarter of the bytes
        digest.update(self.kv_slot.astype(np.uint16).tobytes())
        if self.needed is not None:
            digest.update(np.packbits(self.needed).tobytes())
            digest.update(f"{self.chunk_shares} {self.one_ahead}".encode())
        return int.from_bytes(digest.digest(), "big") >> 1

    def equals(self, other: Assignment) -> bool:
        """Whether both send the same pieces to the same ranks."""
        return self is other or (
            (self.strategy, self.grid) == (other.strategy, other.grid)
            and (self.chunk_shares, self.one_ahead) == (other.chunk_shares, other.one_ahead)
            and np.array_equal(self.q_owner, other.q_owner)
            and np.array_equal(self.kv_slot, other.kv_slot)
            and (self.needed is None) == (other.needed is None)
            and (self.needed is None or other.needed is None or np.array_equal(self.needed, other.needed))
        )

    def work(self, counts: MaskCounts) -> np.ndarray:
        """int64[periods, P]: b(i, g) of Eq. 1, dense blocks by (ring step, rank), or by (chunk of needed keys, rank).

        counts: of a mask of this grid
        """
        if self.needed is None:
            ring, ulysses = self.strategy.ring, self.strategy.ulysses
            return owned_work(self.q_owner, counts.work_by_slot(self.kv_slot, ring), ulysses)
        of_key = counts.columns_by_rank(self.q_owner, self.strategy.world)
        return np.stack([np.where(chunk, of_key, 0).sum(axis=(1, 2), dtype=np.int64) for chunk in self.chunks])

    def rows_of(self, rank: int) -> tuple[np.ndarray, np.ndarray]:
        """(head, query block) of the rows that `rank` computes, int64[Rq] each, in packing order."""
        return _places_of(self.q_owner == rank)

    def slot_blocks(self, slot: int, ulysses_rank: int) -> tuple[np.ndarray, np.ndarray]:
        """(head, KV block) of what travels in `slot` to `ulysses_rank`, int64[Ck] each, as packed."""
        return _places_of((self.kv_slot == slot) & self.head_ulysses_ranks[:, ulysses_rank, None])

    def blocks_by_period(self, rank: int) -> list[tuple[np.ndarray, np.ndarray]]:
        """(head, KV block) of what `rank` computes with in each period, int64[Ck] each, as packed.

        In ring step i, ring rank r has slot (r + i) mod y.
        """
        if self.needed is not None:
            return [_places_of(chunk[rank]) for chunk in self.chunks]
        ring_rank, column = divmod(rank, self.strategy.ulysses)
        wanted = np.flatnonzero(np.repeat(self.head_ulysses_ranks[:, column], self.kv_slot.shape[1]))
        step = (self.kv_slot.reshape(-1)[wanted] - ring_rank) % self.strategy.ring
        step = step.astype(np.uint16)  # sorted by radix
        sizes = np.bincount(step, minlength=self.strategy.ring)
        pieces = np.split(wanted[np.argsort(step, kind="stable")], np.cumsum(sizes)[:-1])
        return [(piece // self.kv_slot.shape[1], piece % self.kv_slot.shape[1]) for piece in pieces]


def _places_of(chosen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """`np.nonzero` of bool[H, n], which takes several times as long in two dimensions as in one."""
    head, block = np.divmod(np.flatnonzero(chosen), chosen.shape[1])
    return head, block
