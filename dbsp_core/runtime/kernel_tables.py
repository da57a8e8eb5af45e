"""Kernel tables: from mask bits to the packed KV blocks that each of a rank's rows attends to, period by period.

What follows from the plan alone is a `TableLayout`, made once per plan. What follows from the mask is made from it
where the mask's bits are, for all periods at once: a fixed number of operations, and no host synchronisation.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch

from dbsp_core.masks.block_mask import BlockMask
from dbsp_core.planning.assignment import Assignment
from dbsp_kernels import DenseHeadLayout, DensePart
from dbsp_kernels.packing.h2d import to_device
from dbsp_kernels.packing.row_bits import expand_rows, pack_rows

__all__ = [
    "DenseRows",
    "KernelTable",
    "RingStepTable",
    "TableLayout",
    "build_tables",
    "dense_head_layout",
    "dense_heads_of",
    "table_layout",
]


@dataclass(frozen=True, eq=False)
class KernelTable:
    """What the kernel reads in one period; see `dbsp_kernels.block_attention`.

    kv_index: int32[B·Rq, width]; kv_count, kv_full, row_schedule: int32[B·Rq]; kv_len: int32[B·Ck]
    """

    kv_index: torch.Tensor
    kv_count: torch.Tensor
    kv_len: torch.Tensor
    kv_full: torch.Tensor
    row_schedule: torch.Tensor


@dataclass(frozen=True, eq=False)
class DenseRows:
    """Rows of heads whose every block is dense, in one period.

    parts: head by head
    every: whether they are all rows of this rank
    kv_count, kv_full: int32[Rq], those of the table, 0 for these rows
    """

    parts: tuple[DensePart, ...]
    every: bool
    kv_count: torch.Tensor
    kv_full: torch.Tensor


@dataclass(frozen=True, eq=False)
class RingStepTable:
    """What is kept for one period: the rows' blocks as bits, an eighth of a byte each (`packing.row_bits`).

    bits: uint8[Rq, ceil(width / 8)], base: int32[Rq]: row r attends to packed block base[r] + j where bit j is set
    kv_count, kv_full: int32[Rq], the blocks of each row, and how many of them are not short
    dense: the rows that torch's dense kernels compute better; None: there are none, or none are known
    row_schedule: int32[Rq], head by head, heavy rows first: a head's keys and values stay in the cache while its rows
           run, and no long row starts last, while the rest of the chip waits for it
    kv_len: int32[Ck], tokens of each packed block; width: blocks of a head in any period, at most; block_k: tokens
    """

    bits: torch.Tensor
    base: torch.Tensor
    kv_count: torch.Tensor
    kv_full: torch.Tensor
    row_schedule: torch.Tensor
    kv_len: torch.Tensor
    width: int
    block_k: int
    dense: DenseRows | None = None

    def expanded(self, batch: int = 1) -> KernelTable:
        """The table for `batch` copies of the rows, the b-th of which attends to the b-th copy of the blocks."""
        index = expand_rows(self.bits, self.base, self.kv_len, self.kv_full, self.width, self.block_k, batch)
        if batch == 1:
            return KernelTable(index, self.kv_count, self.kv_len, self.kv_full, self.row_schedule)
        schedule = self.row_schedule
        copies = torch.arange(batch, dtype=torch.int32, device=schedule.device)[:, None] * len(schedule)
        count, length, full = (t.repeat(batch) for t in (self.kv_count, self.kv_len, self.kv_full))
        return KernelTable(index, count, length, full, (schedule + copies).flatten())


class HeadSpan(NamedTuple):
    """rows, blocks: first and last packed ones of a head, exclusive;  lengths: int64, tokens of each of the blocks"""

    head: int
    rows: tuple[int, int]
    blocks: tuple[int, int]
    lengths: np.ndarray


@dataclass(frozen=True, eq=False)
class TableLayout:
    """What the kernel tables of all masks under one plan have in common, on one rank.

    heads:   int64[Rq], each row's head;  rows: int64[Rq], head · nq + query block
    turn:    int64[Rq], grows from head to head by more than any row has blocks
    columns: int64[periods, H, width]: column j of a row stands for this KV block, the j-th of its head's in the
             slot, in packing order
    present: bool[periods, H, width], whether there is such a block;  full: whether it has all of a block's tokens
    spans:   by period, on the host: of each head with rows, where its rows and blocks are
    base:    by period int32[Rq], the packed block of each row's column 0
    kv_len:  by period int32[Ck], tokens of each packed block
    as_masked: whether column j is KV block j for all rows: then a mask's bits are taken as they are
    """

    heads: torch.Tensor
    rows: torch.Tensor
    turn: torch.Tensor
    columns: torch.Tensor
    present: torch.Tensor
    full: torch.Tensor
    base: tuple[torch.Tensor, ...]
    kv_len: tuple[torch.Tensor, ...]
    spans: tuple[tuple[HeadSpan, ...], ...]
    block_k: int
    as_masked: bool

    @property
    def width(self) -> int:
        return self.columns.shape[2]

    def to(self, device: torch.device) -> TableLayout:
        """The same on a device. It is on the host."""
        if device.type == "cpu":
            return self

        def move(value: Any) -> Any:
            if isinstance(value, tuple):
                return tuple(map(move, value))
            return to_device(value.numpy(), device) if isinstance(value, torch.Tensor) else value

        return replace(self, **{name: move(value) for name, value in vars(self).items()})


def table_layout(assignment: Assignment, rank: int) -> TableLayout:
    """The layout of one rank's tables."""
    axis = assignment.grid.k_axis
    row_head, row_block = assignment.rows_of(rank)
    packed = assignment.blocks_by_period(rank)
    per_head = np.stack([np.bincount(head, minlength=assignment.heads) for head, _ in packed])  # int64[y, H]
    first = np.cumsum(per_head, axis=1) - per_head
    width = int(per_head.max(initial=0))
    as_masked = len(packed) == 1 and width == len(axis) and bool((per_head[0, np.unique(row_head)] == width).all())
    width += 0 if as_masked else -width % 8  # whole bytes of bits
    # Blocks are packed by period and head, as these arrays have them.
    present = np.arange(width) < per_head[..., None]
    block = np.concatenate([block for _, block in packed])
    columns, full = np.zeros(present.shape, dtype=np.int64), np.zeros(present.shape, dtype=bool)
    columns[present] = block
    full[present] = axis.lengths[block] == axis.block
    return TableLayout(
        heads=torch.from_numpy(row_head),
        rows=torch.from_numpy(row_head * assignment.grid.nq + row_block),
        turn=torch.from_numpy(row_head * (width + 1)),
        columns=torch.from_numpy(columns),
        present=torch.from_numpy(present),
        full=torch.from_numpy(full),
        base=tuple(torch.from_numpy(of_period[row_head]) for of_period in first.astype(np.int32)),
        kv_len=tuple(torch.from_numpy(axis.lengths[block].astype(np.int32)) for _, block in packed),
        spans=tuple(
            _spans(row_head, start, number, axis.lengths[of_period])
            for start, number, (_, of_period) in zip(first, per_head, packed, strict=True)
        ),
        block_k=axis.block,
        as_masked=as_masked,
    )


def _spans(row_head: np.ndarray, first: np.ndarray, number: np.ndarray, lengths: np.ndarray) -> tuple[HeadSpan, ...]:
    """row_head: int64[Rq]; first, number: int64[H], of each head's packed blocks; lengths: int64[Ck]"""
    heads, start = np.unique(row_head, return_index=True)
    stop = np.append(start, len(row_head))[1:]
    return tuple(
        HeadSpan(int(head), (int(a), int(b)), (int(c), int(c + n)), lengths[c : c + n])
        for head, a, b, c, n in zip(heads, start, stop, first[heads], number[heads], strict=True)
    )


def dense_heads_of(mask: BlockMask, device: torch.device) -> np.ndarray | None:
    """bool[H], heads whose every block is dense; None where asking would make the host wait for a device."""
    if mask.bits.device.type != "cpu" or device.type != "cuda":  # the CPU's kernel finds them by itself
        return None
    dense: np.ndarray = mask.bits.flatten(1).all(dim=1).numpy()
    return dense


def build_tables(
    layout: TableLayout, mask: BlockMask, dense_heads: np.ndarray | None = None
) -> tuple[RingStepTable, ...]:
    """One table per period, on the layout's device. mask: of the plan's grid; dense_heads: see `dense_heads_of`"""
    # 1. The rows' bits by period, and what rows have to do.
    bits = mask.bits.flatten(0, 1).to(layout.rows.device, non_blocking=True)
    of_mask = layout.columns, layout.present, layout.full, layout.as_masked
    packed, count, full, key = pack_rows(bits, layout.rows, layout.heads, layout.turn, *of_mask)
    # 2. In which order they start.
    order = torch.argsort(key, dim=1, stable=True).to(torch.int32)
    # 3. Period by period.
    of_rows = (of_all.unbind(0) for of_all in (packed, count, full, order))
    tables = tuple(
        RingStepTable(bits, base, count, full, order, kv_len, layout.width, layout.block_k)
        for bits, count, full, order, base, kv_len in zip(*of_rows, layout.base, layout.kv_len, strict=True)
    )
    if dense_heads is None or not dense_heads.any():
        return tables
    both = zip(tables, layout.spans, strict=True)
    return tuple(replace(table, dense=_dense_rows(table, spans, dense_heads)) for table, spans in both)


def _dense_rows(table: RingStepTable, spans: tuple[HeadSpan, ...], dense_heads: np.ndarray) -> DenseRows | None:
    rest = np.ones(len(table.kv_count), dtype=np.int32)
    parts = []
    for span in spans:
        if not dense_heads[span.head] or not len(span.lengths):
            continue
        rest[slice(*span.rows)] = 0
        place, tokens = np.arange(table.block_k), None
        if (span.lengths < table.block_k).any():
            tokens = to_device(np.flatnonzero(place < span.lengths[:, None]), table.kv_count.device)
        parts.append(DensePart(span.rows, span.blocks, tokens))
    if not parts:
        return None
    kept = to_device(rest, table.kv_count.device)
    return DenseRows(tuple(parts), not rest.any(), table.kv_count * kept, table.kv_full * kept)


def dense_head_layout(assignment: Assignment, rank: int) -> DenseHeadLayout | None:
    """What the kernel is told where the ranks' rows are simply all those of whole heads; None where they are not.

    The answer is None on all ranks or on none.
    """
    grid = assignment.grid
    only_the_last_is_short = grid.text_tokens % grid.block_q == grid.text_tokens % grid.block_k == 0
    if assignment.strategy.ring > 1 or assignment.split_heads or not only_the_last_is_short:
        return None
    if assignment.needed is not None and not assignment.needed.any(axis=0).all():  # a block that nobody needs
        return None
    return DenseHeadLayout(len(assignment.rows_of(rank)[0]) // grid.nq, grid.tokens)
