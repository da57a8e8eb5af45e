"""What a plan assigns: an owner to each row, and the chunks of keys and values that come to it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from dbsp_core.layout.strategy import Strategy
from dbsp_core.masks.block_mask import BlockMask
from dbsp_core.masks.grid import BlockGrid
from dbsp_core.planning.chunks import NEEDED, Chunks, columns_of_heads
from dbsp_core.planning.wire_format import MODEL, WireFormat
from dbsp_core.utils.errors import UserError

__all__ = ["Assignment"]


@dataclass(frozen=True, eq=False, repr=False)
class Assignment:
    """Which rank computes each row, and which keys come to it when: for any mask that `serves` accepts.

    Attributes:
        q_owner: int64[H, nq], rank of each (head, query block).
        chunks: Which KV blocks each rank is sent in which chunk.
        wire: How queries, keys and values are written on their way.
    """

    strategy: Strategy
    grid: BlockGrid
    q_owner: np.ndarray
    chunks: Chunks
    wire: WireFormat = MODEL

    def __repr__(self) -> str:
        blocks = f"{self.grid.nq} × {self.grid.nk} blocks"
        return f"<Assignment {self.strategy} of {self.heads} heads of {blocks}, keys: {self.chunks.keys}>"

    @property
    def heads(self) -> int:
        return len(self.q_owner)

    @property
    def split_heads(self) -> int:
        """Heads whose rows are in more than one Ulysses rank."""
        return int((self._columns > 1).sum())

    @property
    def extra_kv(self) -> float:
        """K and V elements sent more than once, as a share of all Q, K, V.

        Where all keys are sent: to more ranks than one of each ring row. Needed ones: to more than one at all.
        """
        if self.chunks.keys == NEEDED:
            copies = (self.chunks.sent.sum(axis=0) - 1).clip(min=0).sum(axis=0)
            return int(copies @ self.grid.k_axis.lengths) * 2 / (3 * self.heads * self.grid.tokens)
        return int((self._columns - 1).clip(min=0).sum()) * 2 / (3 * self.heads)

    @cached_property
    def _columns(self) -> np.ndarray:
        """int64[H]: in how many Ulysses ranks each head has rows."""
        columns: np.ndarray = columns_of_heads(self.q_owner, self.strategy.ulysses).sum(axis=1)
        return columns

    def rows_of(self, rank: int) -> tuple[np.ndarray, np.ndarray]:
        """(head, query block) of the rows that `rank` computes, int64[Rq] each, in packing order."""
        head, block = np.divmod(np.flatnonzero(self.q_owner == rank), self.q_owner.shape[1])  # faster than np.nonzero
        return head, block

    @cached_property
    def fingerprint(self) -> int:
        """63 bits that differ between assignments: equal on all ranks or the job would hang or be wrong."""
        names = self.strategy, self.grid, self.chunks.keys, self.wire.name
        digest = hashlib.blake2b(str(names).encode(), digest_size=8)
        digest.update(self.q_owner.astype(np.uint16).tobytes())  # no more ranks than that, and a quarter of the bytes
        for part in self.chunks.identity:
            digest.update(part.tobytes())
        return int.from_bytes(digest.digest(), "big") >> 1

    def equals(self, other: Assignment) -> bool:
        """Whether both send the same pieces to the same ranks."""
        return self is other or (
            (self.strategy, self.grid, self.wire) == (other.strategy, other.grid, other.wire)
            and np.array_equal(self.q_owner, other.q_owner)
            and self.chunks.equals(other.chunks)
        )

    def require_fit(self, mask: BlockMask) -> None:
        """Raises UserError for a mask of another number of heads or on another grid."""
        if self.heads != mask.heads:
            raise UserError(f"the plan has {self.heads} heads, the mask {mask.heads}; make a plan for this mask")
        if self.grid != mask.grid:
            raise UserError(f"the plan is on {self.grid}, the mask on {mask.grid}; make a plan for this mask")

    def serves(self, mask: BlockMask) -> bool:
        """Whether all keys that a mask of this grid needs are sent. Raises UserError where `require_fit` does."""
        self.require_fit(mask)
        return self.chunks.serves(self.q_owner, mask)
