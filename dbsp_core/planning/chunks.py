"""Keys and values to send to each rank, by chunk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dbsp_core.layout.strategy import Strategy
from dbsp_core.masks.block_mask import BlockMask

ALL, NEEDED = "all", "needed"
"""Values of setting `keys`."""


@dataclass(frozen=True, eq=False, repr=False)
class Chunks:
    """The y chunks in which keys and values are sent: ring rank r gets chunk i from ring rank (r − i) mod y.

    Chunk 0 comes from the rank's own ring row. Each chunk arrives in one all-to-all while the kernel runs on the
    previous chunk, so ranks do not wait for each other's kernels.
    """

    keys: str  # Setting `keys`
    sent: np.ndarray  # bool[P, H, nk], (head, KV block) pairs sent to each rank
    k_ring_rank: np.ndarray  # int64[nk] or int64[H, nk], ring rank that holds most of each KV block outside attention
    ring: int  # y

    @classmethod
    def of_heads(cls, owner: np.ndarray, k_ring_rank: np.ndarray, strategy: Strategy) -> Chunks:
        """Sends all keys of every head with rows on the rank's Ulysses rank, which fits any mask.

        Args:
            owner: int64[H, nq], rank of each row.
        """
        columns = columns_of_heads(owner, strategy.ulysses)
        of_rank = columns.T[np.arange(strategy.world) % strategy.ulysses]
        sent = np.broadcast_to(of_rank[..., None], (*of_rank.shape, k_ring_rank.shape[-1]))
        return cls(ALL, sent, k_ring_rank, strategy.ring)

    @classmethod
    def of_rows(cls, owner: np.ndarray, k_ring_rank: np.ndarray, strategy: Strategy, mask: BlockMask) -> Chunks:
        """Sends only the keys that a rank's rows need under `mask` (as in DSV, Tan et al. 2025, §5.2)."""
        return cls(NEEDED, _needed(owner, strategy.world, mask), k_ring_rank, strategy.ring)

    def __repr__(self) -> str:
        return f"<Chunks of {self.sent.shape[1]} heads of {self.sent.shape[2]} blocks, keys: {self.keys}>"

    def blocks_for(self, rank: int) -> list[tuple[np.ndarray, np.ndarray]]:
        """Returns heads and KV blocks sent to `rank` in each chunk, int64[Ck] each, in packing order."""
        flat = np.flatnonzero(self.sent[rank])
        head, block = np.divmod(flat, self.sent.shape[2])
        source = np.broadcast_to(self.k_ring_rank, self.sent.shape[1:]).ravel()[flat]
        chunk = (self._ring_rank[rank] - source) % self.ring
        return [(head[chunk == number], block[chunk == number]) for number in range(self.ring)]

    @property
    def _ring_rank(self) -> np.ndarray:
        return np.arange(len(self.sent)) * self.ring // len(self.sent)

    def _chunk(self, heads: np.ndarray) -> np.ndarray:
        """Returns the chunk of each KV block for each rank, int64[P, nk]; heads must share a token order."""
        k_ring_rank = self.k_ring_rank if self.k_ring_rank.ndim == 1 else self.k_ring_rank[heads[0]]
        chunk: np.ndarray = (self._ring_rank[:, None] - k_ring_rank) % self.ring
        return chunk

    def readers(self, chunk: int, heads: np.ndarray, blocks: np.ndarray) -> np.ndarray:
        """Returns the ranks that KV blocks are sent to in a chunk, int64[heads, blocks, P], −1 elsewhere.

        Args:
            heads: Heads that share a token order.
        """
        sent = self.sent[:, heads][:, :, blocks] & (self._chunk(heads)[:, None, blocks] == chunk)
        return np.where(sent.transpose(1, 2, 0), np.arange(len(self.sent)), -1)

    def copies(self, heads: np.ndarray) -> Sequence[np.ndarray]:
        """Returns per chunk the number of heads that need each block on each rank, [P, nk]; one token order."""
        narrow = np.uint8 if len(heads) < 256 else np.uint16  # narrower is faster
        copies, chunk = np.add.reduce(self.sent[:, heads], axis=1, dtype=narrow), self._chunk(heads)
        return [np.where(chunk == number, copies, 0) for number in range(self.ring)]

    @property
    def sends_every_block(self) -> bool:
        """True if every KV block is sent to some rank."""
        return self.keys == ALL or bool(self.sent.any(axis=0).all())

    def covers(self, owner: np.ndarray, mask: BlockMask) -> bool:
        """Returns True if all keys that these owners' rows need under a mask are sent. Reads the mask's bits."""
        return not (_needed(owner, len(self.sent), mask) & ~self.sent).any()

    @property
    def identity(self) -> tuple[Any, ...]:
        """Arrays that identify what is sent; for `ALL` it follows from the owners."""
        k_ring_rank = self.k_ring_rank.astype(np.uint16)  # a quarter of the bytes, enough for any ring
        return (k_ring_rank,) if self.keys == ALL else (k_ring_rank, np.packbits(self.sent))

    def equals(self, other: Chunks) -> bool:
        """Returns True if both send the same keys, given equal owners."""
        return (self.keys, self.ring) == (other.keys, other.ring) and all(
            np.array_equal(mine, theirs) for mine, theirs in zip(self.identity, other.identity, strict=True)
        )


def columns_of_heads(owner: np.ndarray, ulysses: int) -> np.ndarray:
    """Returns bool[H, x]: True if the head has rows on the Ulysses rank, which then needs its keys and values."""
    cell = owner % ulysses + np.arange(len(owner))[:, None] * ulysses
    has_rows: np.ndarray = np.bincount(cell.ravel(), minlength=len(owner) * ulysses) > 0
    return has_rows.reshape(len(owner), ulysses)


def _needed(owner: np.ndarray, world: int, mask: BlockMask) -> np.ndarray:
    """Returns bool[P, H, nk]: KV blocks that a row of the rank attends to. Reads the mask on the host."""
    needed: np.ndarray = mask.counts.columns_by_rank(owner, world) > 0
    return needed
