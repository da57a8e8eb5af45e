"""Needed keys for masks that change at every call: those of an earlier mask, and what the call's mask adds to them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from dbsp_core.masks.block_mask import BlockMask
from dbsp_core.masks.mask_counts import MaskCounts
from dbsp_core.planning.key_chunks import NeededKeys, needed_by, slot_by_slot
from dbsp_core.planning.row_owners import RowOwners

__all__ = ["ADDED", "KeptKeys"]

ADDED = 0.02
"""Share of the kept keys that a mask is assumed to add where that is not known. One step adds 0.1 to 1.2 %
(docs/results/needed-keys-predicted.csv), and kept keys are some steps old."""
OUTDATED = 0.10
"""Keys that may be missing or in vain on any rank before all are renewed, as a share of what a rank keeps on average.
Up to there old keys cost less than 0.5 % of the modelled time, and new ones a route and its way to the device."""


class _SettledKeys(NeededKeys):
    """Needed keys in any layout, whose chunks take blocks in turn slot by slot."""

    @property
    def _turns(self) -> np.ndarray:
        return slot_by_slot(self.slot)


@dataclass(frozen=True, eq=False, repr=False)
class KeptKeys(NeededKeys):
    """The keys that a rank's rows needed under an earlier mask, and in one more period what a call's mask adds.

    The last period's keys come in an exchange of their own, whose sizes all ranks know from the mask's bits that they
    share. So it serves every mask.

    Attributes:
        sent: bool[P, H, nk], what is kept.
        added: bool[P, H, nk], what the mask in question adds. None: it is not known, and `ADDED` of `sent` is assumed.
    """

    name = "kept"
    planner = "dbsp"
    known_masks = False
    adds = True

    added: np.ndarray | None = None

    @cached_property
    def settled(self) -> NeededKeys:
        return _SettledKeys(self.slot, self.sent, self.ulysses, self.shares, self.one_ahead)

    def with_mask(self, rows: RowOwners, mask: BlockMask) -> KeptKeys:
        """The same, told what this mask adds."""
        return replace(self, added=needed_by(rows, mask) & ~self.sent)

    def renewed(self, rows: RowOwners, mask: BlockMask) -> KeptKeys:
        """See `KeyTravel.renewed`; itself where it keeps about what this mask needs."""
        needed = needed_by(rows, mask)
        differ = (needed != self.sent).sum(axis=(1, 2))
        if differ.max() * len(differ) <= OUTDATED * self.sent.sum():
            return self
        return replace(self, sent=needed, added=None)

    @property
    def periods(self) -> int:
        return self.settled.periods + 1

    @cached_property
    def chunks(self) -> tuple[np.ndarray, ...]:
        """See `KeysInChunks`. Raises ValueError where it is not known what the mask adds."""
        if self.added is None:
            raise ValueError("kept keys have a last chunk only with a mask; see with_mask")
        return *self.settled.chunks, self.added

    def copies(self, rows: RowOwners, heads: np.ndarray) -> Sequence[np.ndarray]:
        if self.added is not None:
            return super().copies(rows, heads)
        settled = self.settled.copies(rows, heads)
        of_all = np.zeros(settled[0].shape)
        for copies in settled:
            of_all += copies
        return [*settled, ADDED * of_all]

    def work(self, rows: RowOwners, counts: MaskCounts) -> np.ndarray:
        """See `KeyTravel.work`; the last period's is what the mask with these counts adds."""
        of_key = counts.columns_by_rank(rows.q_owner, len(self.sent))
        added = np.where(self.sent, 0, of_key).sum(axis=(1, 2), dtype=np.int64)
        return np.concatenate([self.settled.work(rows, counts), added[None]])

    def serves(self, rows: RowOwners, mask: BlockMask) -> bool:
        return True

    @property
    def sends_all(self) -> bool:
        """Not by what is kept."""
        return False
