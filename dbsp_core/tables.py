"""Kernel tables: from mask bits to the packed KV blocks that each of a rank's rows attends to, period by period."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from dbsp_core.mask import BlockMask
from dbsp_core.plan import Plan

__all__ = ["PeriodTable", "build_tables"]


@dataclass(frozen=True, eq=False)
class PeriodTable:
    """What the kernel needs in one period; see `dbsp_kernels.block_attention`.

    kv_index: int32[Rq, max], kv_count: int32[Rq], kv_len: int32[Ck]
    """

    kv_index: torch.Tensor
    kv_count: torch.Tensor
    kv_len: torch.Tensor

    def repeat(self, batch: int) -> PeriodTable:
        """The table for `batch` copies of the rows, the b-th of which attends to the b-th copy of the blocks."""
        if batch == 1:
            return self
        offset = torch.arange(batch, dtype=torch.int32, device=self.kv_index.device) * len(self.kv_len)
        index = (self.kv_index + offset[:, None, None]).flatten(0, 1)
        return PeriodTable(index, self.kv_count.repeat(batch), self.kv_len.repeat(batch))


def build_tables(plan: Plan, mask: BlockMask, rank: int, device: torch.device) -> tuple[PeriodTable, ...]:
    """One table per period: in period i, ring rank r computes with slot (r + i) mod y."""
    ring_rank, column = divmod(rank, plan.strategy.ulysses)
    slots = [(ring_rank + period) % plan.strategy.ring for period in range(plan.strategy.ring)]
    return tuple(_table(plan, mask, rank, slot, column, device) for slot in slots)


def _table(plan: Plan, mask: BlockMask, rank: int, slot: int, column: int, device: torch.device) -> PeriodTable:
    row_head, row_block = (torch.from_numpy(a).to(device) for a in plan.rows_of(rank))
    kv_head, kv_block = plan.slot_blocks(slot, column)
    position = np.full(plan.kv_slot.shape, -1, dtype=np.int32)
    position[kv_head, kv_block] = np.arange(len(kv_head))
    row_position = torch.from_numpy(position).to(device)[row_head]
    needed = mask.bits.to(device)[row_head, row_block] & (row_position >= 0)
    count = needed.sum(dim=1)
    row, block = needed.nonzero(as_tuple=True)
    first = torch.cumsum(count, 0) - count
    index = torch.zeros(len(count), int(count.max()) if len(count) else 0, dtype=torch.int32, device=device)
    index[row, torch.arange(len(row), device=device) - first[row]] = row_position[row, block]
    lengths = torch.from_numpy(plan.grid.k_axis.lengths[kv_block].astype(np.int32)).to(device)
    return PeriodTable(index, count.to(torch.int32), lengths)
