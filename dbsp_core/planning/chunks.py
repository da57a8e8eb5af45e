"""Keys and values that each rank is sent, and in which chunk: all of its heads', or those that its rows need."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dbsp_core.layout.strategy import Strategy
from dbsp_core.masks.block_mask import BlockMask
from dbsp_core.utils.errors import UserError, did_you_mean

ALL, NEEDED = "all", "needed"
KEYS = (ALL, NEEDED)
"""The values of setting `keys`."""


def require_keys(keys: str) -> None:
    """Raises UserError for a value that is not one of `KEYS`."""
    if keys not in KEYS:
        raise UserError(f"keys cannot be {keys!r}; use one of {', '.join(KEYS)}" + did_you_mean(keys, KEYS))


@dataclass(frozen=True, eq=False, repr=False)
class Chunks:
    """Keys and values are sent by their source ranks in y chunks: chunk i by the ranks of ring rank (r − i) mod y.

    So chunk 0 is what a rank's own ring row has already. Each chunk comes in one all-to-all while the kernel runs on
    the one before it, and no rank waits for another's kernel.

    Attributes:
        keys: Setting `keys`.
        sent: bool[P, H, nk], the (head, KV block) pairs that each rank is sent.
        k_ring_rank: int64[nk] or int64[H, nk], the ring rank that holds most of each KV block outside attention.
        ring: y.
    """

    keys: str
    sent: np.ndarray
    k_ring_rank: np.ndarray
    ring: int

    @classmethod
    def of_heads(cls, owner: np.ndarray, k_ring_rank: np.ndarray, strategy: Strategy) -> Chunks:
        """Sends all keys of the heads of which a rank's column has rows: for any mask.

        Args:
            owner: int64[H, nq], the rank of each row.
        """
        columns = columns_of_heads(owner, strategy.ulysses)
        of_rank = columns.T[np.arange(strategy.world) % strategy.ulysses]
        sent = np.broadcast_to(of_rank[..., None], (*of_rank.shape, k_ring_rank.shape[-1]))
        return cls(ALL, sent, k_ring_rank, strategy.ring)

    @classmethod
    def of_rows(cls, owner: np.ndarray, k_ring_rank: np.ndarray, strategy: Strategy, mask: BlockMask) -> Chunks:
        """Sends only the keys that a rank's rows need (as DSV does, Tan et al. 2025, §5.2): for masks like `mask`."""
        return cls(NEEDED, _needed(owner, strategy.world, mask), k_ring_rank, strategy.ring)

    def __repr__(self) -> str:
        return f"<Chunks of {self.sent.shape[1]} heads of {self.sent.shape[2]} blocks, keys: {self.keys}>"

    def blocks_for(self, rank: int) -> list[tuple[np.ndarray, np.ndarray]]:
        """Returns (head, KV block) of what `rank` is sent in each chunk, int64[Ck] each, as packed."""
        flat = np.flatnonzero(self.sent[rank])
        head, block = np.divmod(flat, self.sent.shape[2])
        source = np.broadcast_to(self.k_ring_rank, self.sent.shape[1:]).ravel()[flat]
        chunk = (self._ring_rank[rank] - source) % self.ring
        return [(head[chunk == number], block[chunk == number]) for number in range(self.ring)]

    @property
    def _ring_rank(self) -> np.ndarray:
        """int64[P]"""
        return np.arange(len(self.sent)) * self.ring // len(self.sent)

    def _chunk(self, heads: np.ndarray) -> np.ndarray:
        """Returns int64[P, nk]: the chunk in which KV blocks come to each rank, of heads with one token order."""
        k_ring_rank = self.k_ring_rank if self.k_ring_rank.ndim == 1 else self.k_ring_rank[heads[0]]
        chunk: np.ndarray = (self._ring_rank[:, None] - k_ring_rank) % self.ring
        return chunk

    def readers(self, chunk: int, heads: np.ndarray, blocks: np.ndarray) -> np.ndarray:
        """Returns int64[heads, blocks, P]: the ranks that KV blocks are sent to in a chunk, and -1 in place of others.

        Args:
            heads: Some with one token order.
        """
        sent = self.sent[:, heads][:, :, blocks] & (self._chunk(heads)[:, None, blocks] == chunk)
        return np.where(sent.transpose(1, 2, 0), np.arange(len(self.sent)), -1)

    def copies(self, heads: np.ndarray) -> Sequence[np.ndarray]:
        """Returns by chunk number[P, nk]: how many of these heads, of one token order, need a block on each rank."""
        narrow = np.uint8 if len(heads) < 256 else np.uint16  # the narrower, the faster
        copies, chunk = np.add.reduce(self.sent[:, heads], axis=1, dtype=narrow), self._chunk(heads)
        return [np.where(chunk == number, copies, 0) for number in range(self.ring)]

    @property
    def sends_every_block(self) -> bool:
        """True if every KV block is sent to some rank."""
        return self.keys == ALL or bool(self.sent.any(axis=0).all())

    def covers(self, owner: np.ndarray, mask: BlockMask) -> bool:
        """Returns True if all keys that the rows of these owners need under a mask are sent. Reads its bits."""
        return not (_needed(owner, len(self.sent), mask) & ~self.sent).any()

    @property
    def identity(self) -> tuple[Any, ...]:
        """Arrays that differ where what is sent does; `ALL` follows from the rows' owners."""
        k_ring_rank = self.k_ring_rank.astype(np.uint16)  # no more ranks than that, and a quarter of the bytes
        return (k_ring_rank,) if self.keys == ALL else (k_ring_rank, np.packbits(self.sent))

    def equals(self, other: Chunks) -> bool:
        """Returns True if both send the same, for rows of the same owners."""
        return (self.keys, self.ring) == (other.keys, other.ring) and all(
            np.array_equal(mine, theirs) for mine, theirs in zip(self.identity, other.identity, strict=True)
        )


def columns_of_heads(owner: np.ndarray, ulysses: int) -> np.ndarray:
    """Returns bool[H, x]: the Ulysses ranks in which each head has rows, hence needs its keys and values."""
    cell = owner % ulysses + np.arange(len(owner))[:, None] * ulysses
    has_rows: np.ndarray = np.bincount(cell.ravel(), minlength=len(owner) * ulysses) > 0
    return has_rows.reshape(len(owner), ulysses)


def _needed(owner: np.ndarray, world: int, mask: BlockMask) -> np.ndarray:
    """Returns bool[P, H, nk]: what some row of each rank attends to. Reads the mask on the host."""
    needed: np.ndarray = mask.counts.columns_by_rank(owner, world) > 0
    return needed
