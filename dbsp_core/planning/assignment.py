"""What a plan assigns: an owner to each row, and how keys and values travel to it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from dbsp_core.masks.block_mask import BlockMask
from dbsp_core.masks.mask_counts import MaskCounts
from dbsp_core.planning.imbalance import owned_work
from dbsp_core.planning.key_travel import KeyTravel
from dbsp_core.planning.row_owners import RowOwners
from dbsp_core.planning.wire_format import MODEL, WireFormat
from dbsp_core.utils.errors import UserError

__all__ = ["Assignment", "work_of_both"]


@dataclass(frozen=True, eq=False, repr=False)
class Assignment(RowOwners):
    """Which rank computes each row, and how the keys that it needs travel to it: for any mask that `serves` accepts.

    Attributes:
        q_owner: int64[H, nq], rank of each (head, query block).
        keys: Which KV blocks are where in which period.
        wire: How queries, keys and values are written on their way.
    """

    keys: KeyTravel
    wire: WireFormat = MODEL

    def __repr__(self) -> str:
        blocks = f"{self.grid.nq} × {self.grid.nk} blocks"
        return f"<Assignment {self.strategy} of {self.heads} heads of {blocks}, keys: {self.keys.name}>"

    @property
    def periods(self) -> int:
        """How often a rank's kernel runs."""
        return self.keys.periods

    @property
    def extra_kv(self) -> float:
        """K and V elements sent more than once, as a share of all Q, K, V; see `KeyTravel.extra`."""
        return self.keys.extra(self)

    @cached_property
    def fingerprint(self) -> int:
        """63 bits that differ between assignments: equal on all ranks or the job would hang or be wrong."""
        names = self.strategy, self.grid, self.keys.name, self.wire.name
        digest = hashlib.blake2b(str(names).encode(), digest_size=8)
        digest.update(self.q_owner.astype(np.uint16).tobytes())  # no more ranks than that, and a quarter of the bytes
        for part in self.keys.identity():
            digest.update(part.tobytes())
        return int.from_bytes(digest.digest(), "big") >> 1

    def equals(self, other: Assignment) -> bool:
        """Whether both send the same pieces to the same ranks."""
        return self is other or (
            (self.strategy, self.grid, self.wire) == (other.strategy, other.grid, other.wire)
            and np.array_equal(self.q_owner, other.q_owner)
            and self.keys.equals(other.keys)
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
        return self.keys.serves(self, mask)

    def work(self, counts: MaskCounts) -> np.ndarray:
        """int64[periods, P]: b(i, g) of Eq. 1, dense blocks by (period, rank), of a mask with these counts."""
        return self.keys.work(self, counts)

    def blocks_by_period(self, rank: int) -> list[tuple[np.ndarray, np.ndarray]]:
        """(head, KV block) of what `rank` computes with in each period, int64[Ck] each, as packed."""
        return self.keys.blocks_by_period(self, rank)


def work_of_both(one: Assignment, other: Assignment, counts: MaskCounts) -> tuple[np.ndarray, np.ndarray]:
    """`Assignment.work` of two of one strategy and grid: where keys go round the ring, in one pass over the bits."""
    if not (one.keys.lockstep and other.keys.lockstep):
        return one.work(counts), other.work(counts)
    both = counts.work_by_slots([one.keys.slot, other.keys.slot], one.strategy.ring)
    ulysses = one.strategy.ulysses
    return owned_work(one.q_owner, both[0], ulysses), owned_work(other.q_owner, both[1], ulysses)
