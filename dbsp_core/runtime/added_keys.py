"""The last period of kept keys: what one mask needs beyond them, found and fetched while the first kernels run.

Each rank counts from the mask's bits, which all share, what every rank is to be sent: so all know the sizes of the
exchange, and whether there is anything to exchange, without a word.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from dbsp_core.comm.all_to_all import Exchange, KeysAtHome, PendingKeys
from dbsp_core.comm.groups import SequenceGroup
from dbsp_core.comm.route_building import build_fetch
from dbsp_core.masks.block_mask import BlockMask
from dbsp_core.planning.kept_keys import KeptKeys
from dbsp_core.planning.row_owners import places_of
from dbsp_core.runtime.kernel_tables import RingStepTable, TableLayout, build_tables, dense_spans_of
from dbsp_core.runtime.rank_plan import RankPlan
from dbsp_core.runtime.transposed_tables import TransposedLayout, transposed_layouts

__all__ = ["AddedKeys", "AddedPeriod"]


@dataclass(frozen=True, eq=False, repr=False)
class AddedPeriod:
    """One rank's last period under one mask, on the device of its tables.

    Attributes:
        exchange: Brings its keys and values.
        layout: What the kernel tables of masks that add these keys have in common.
        table: The mask's.
    """

    exchange: Exchange
    layout: TableLayout
    table: RingStepTable

    def fetch(self, keys: KeysAtHome, group: SequenceGroup) -> PendingKeys:
        """Its keys and values, in flight. Collective."""
        return self.exchange.start(keys, len(self.table.kv_len), self.table.block_k, group)

    @cached_property
    def transposed(self) -> TransposedLayout:
        """What transposes its table, for backward. Made at the first use."""
        (layout,) = transposed_layouts(self.layout)
        return layout


class AddedKeys:
    """What one mask needs beyond the keys that a plan keeps.

    On a GPU counting starts at once, beside what else the device computes; `period` waits for it.

    Args:
        part: A rank's part in a plan with kept keys.
        mask: Of the plan's grid.
    """

    def __init__(self, part: RankPlan, mask: BlockMask) -> None:
        keys = part.assignment.keys
        if not isinstance(keys, KeptKeys):
            raise ValueError(f"nothing is added to {keys!r}")
        self._part, self._keys = part, keys
        self._mask: BlockMask | None = mask
        self._counted: tuple[torch.Tensor, torch.cuda.Event] | None = None
        if mask.bits.is_cuda and part.kept_on_device is not None:
            self._counted = _count(mask, *part.kept_on_device)

    @cached_property
    def period(self) -> AddedPeriod | None:
        """What it comes to on this rank; None where no rank is to be sent anything."""
        part, mask, added = self._part, self._mask, self._found()
        if mask is None:
            raise RuntimeError("the mask has been let go of already")
        self._mask = self._counted = None
        if not added.any():
            return None
        device = part.table_layout.rows.device
        exchange = build_fetch(part.assignment, part.layout, part.rank, added).to(device)
        layout = part.rows.table_layout([places_of(added[part.rank])]).to(device)
        (table,) = build_tables(layout, mask, dense_spans_of(mask, device))
        return AddedPeriod(exchange, layout, table)

    def _found(self) -> np.ndarray:
        """bool[P, H, nk]: what each rank is to be sent."""
        if self._counted is not None:
            on_host, event = self._counted
            event.synchronize()
            return on_host.numpy()
        if self._mask is None:
            raise RuntimeError("the mask has been let go of already")
        added = self._keys.with_mask(self._part.assignment, self._mask).added
        assert added is not None
        return added


def _count(mask: BlockMask, owner: torch.Tensor, sent: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event]:
    """bool[P, H, nk] on the host, what ranks need beyond `sent`, and the event after which it is there.

    The mask must be held until then: another stream reads it.
    """
    side = _side_stream(mask.bits.device)
    side.wait_stream(torch.cuda.current_stream(mask.bits.device))
    with torch.cuda.stream(side):
        added = (mask.counts.columns_by_rank_on_device(owner, len(sent)) > 0) & ~sent
        on_host = torch.empty(added.shape, dtype=torch.bool, device="cpu", pin_memory=True)
        return on_host.copy_(added, non_blocking=True), side.record_event()


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
