"""Kernel tables: from mask bits to the packed KV blocks that each of a rank's rows attends to, period by period.

All sizes come from the plan, all values are computed where the mask's bits are: no host synchronisation.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from dbsp_core.mask import BlockMask
from dbsp_core.plan import Plan
from dbsp_kernels import WholeHeads
from dbsp_kernels.rows import expand_rows, pack_bits
from dbsp_kernels.transfer import to_device

__all__ = ["KernelTable", "PeriodTable", "build_tables", "whole_heads"]


@dataclass(frozen=True, eq=False)
class KernelTable:
    """What the kernel reads in one period; see `dbsp_kernels.block_attention`.

    kv_index: int32[B·Rq, width]; kv_count, kv_full, order: int32[B·Rq]; kv_len: int32[B·Ck]
    """

    kv_index: torch.Tensor
    kv_count: torch.Tensor
    kv_len: torch.Tensor
    kv_full: torch.Tensor
    order: torch.Tensor


@dataclass(frozen=True, eq=False)
class PeriodTable:
    """What is kept for one period: the rows' blocks as bits, an eighth of a byte each (see `dbsp_kernels.rows`).

    bits: uint8[Rq, ceil(width / 8)], base: int32[Rq]: row r attends to packed block base[r] + j where bit j is set
    kv_count, kv_full: int32[Rq], the blocks of each row, and how many of them are not short
    order: int32[Rq], head by head, heavy rows first: a head's keys and values stay in the cache while its rows run,
           and no long row starts last, while the rest of the chip waits for it
    kv_len: int32[Ck], tokens of each packed block; width: blocks of a head in the slot, at most; block_k: tokens
    """

    bits: torch.Tensor
    base: torch.Tensor
    kv_count: torch.Tensor
    kv_full: torch.Tensor
    order: torch.Tensor
    kv_len: torch.Tensor
    width: int
    block_k: int

    def expanded(self, batch: int = 1) -> KernelTable:
        """The table for `batch` copies of the rows, the b-th of which attends to the b-th copy of the blocks."""
        index = expand_rows(self.bits, self.base, self.kv_len, self.kv_full, self.width, self.block_k, batch)
        if batch == 1:
            return KernelTable(index, self.kv_count, self.kv_len, self.kv_full, self.order)
        copies = torch.arange(batch, dtype=torch.int32, device=self.order.device)[:, None] * len(self.order)
        count, length, full = (t.repeat(batch) for t in (self.kv_count, self.kv_len, self.kv_full))
        return KernelTable(index, count, length, full, (self.order + copies).flatten())


def build_tables(plan: Plan, mask: BlockMask, rank: int, device: torch.device) -> tuple[PeriodTable, ...]:
    """One table per period: in period i, ring rank r computes with slot (r + i) mod y."""
    ring_rank, column = divmod(rank, plan.strategy.ulysses)
    row_head, row_block = plan.rows_of(rank)
    heads = to_device(row_head, device)
    bits = mask.bits.to(device, non_blocking=True)[heads, to_device(row_block, device)]
    slots = [(ring_rank + period) % plan.strategy.ring for period in range(plan.strategy.ring)]
    return tuple(_table(plan, bits, heads, slot, column) for slot in slots)


def _table(plan: Plan, bits: torch.Tensor, heads: torch.Tensor, slot: int, column: int) -> PeriodTable:
    """bits: bool[Rq, nk], the rows' bits; heads: int64[Rq], their heads."""
    device, axis = bits.device, plan.grid.k_axis
    kv_head, kv_block = plan.slot_blocks(slot, column)
    per_head = np.bincount(kv_head, minlength=plan.heads)
    first = np.cumsum(per_head) - per_head
    width = int(per_head.max(initial=0))
    # Of each head, the blocks in this slot, in packing order: column j of a row stands for the j-th of its head's.
    place = np.arange(len(kv_head)) - first[kv_head]
    blocks = np.zeros((plan.heads, width), dtype=np.int64)
    present, full = np.zeros((2, plan.heads, width), dtype=bool)
    blocks[kv_head, place] = kv_block
    present[kv_head, place] = True
    full[kv_head, place] = axis.lengths[kv_block] == axis.block
    needed = bits
    if width < len(axis) or not present[per_head > 0].all():
        needed = bits.gather(1, to_device(blocks, device)[heads]) & to_device(present, device)[heads]
    count = needed.sum(dim=1)
    return PeriodTable(
        bits=pack_bits(needed),
        base=to_device(first.astype(np.int32), device)[heads],
        kv_count=count.to(torch.int32),
        kv_full=(needed & to_device(full, device)[heads]).sum(dim=1).to(torch.int32),
        order=torch.argsort(heads * (width + 1) - count, stable=True).to(torch.int32),
        kv_len=to_device(axis.lengths[kv_block].astype(np.int32), device),
        width=width,
        block_k=axis.block,
    )


def whole_heads(plan: Plan, rank: int) -> WholeHeads | None:
    """What the kernel is told where the ranks' rows are simply all those of whole heads; None where they are not.

    The answer is None on all ranks or on none.
    """
    grid = plan.grid
    only_the_last_is_short = grid.text_tokens % grid.block_q == grid.text_tokens % grid.block_k == 0
    if plan.strategy.ring > 1 or plan.split_heads or not only_the_last_is_short:
        return None
    return WholeHeads(len(plan.rows_of(rank)[0]) // grid.nq, grid.tokens)
