"""Transposed kernel tables, for backward: from mask bits to the rows that attend to each packed KV block."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dbsp_core.runtime.kernel_tables import ChunkTable, TableLayout
from dbsp_kernels import TransposedTable
from dbsp_kernels.packing.row_bits import expand_rows, pack_bits

__all__ = ["TransposedLayout", "transposed_layouts"]


@dataclass(frozen=True, eq=False)
class TransposedLayout:
    """The rows of each packed block in one chunk: those of its span, one after the other.

    Attributes:
        first: int32[Ck], the first of them.
        rows: int64[Ck], how many.
        column: int64[Ck], the block's in these rows.
        most: rows of a span, at most.
    """

    first: torch.Tensor
    rows: torch.Tensor
    column: torch.Tensor
    most: int

    def table(self, table: ChunkTable, batch: int = 1) -> TransposedTable:
        """Which rows attend to each block, for `batch` copies; made where the bits are, without a synchronisation."""
        blocks, device = len(self.first), table.bits.device
        if not blocks or not self.most:
            return TransposedTable(
                torch.zeros(batch * blocks, 1, dtype=torch.int32, device=device),
                torch.zeros(batch * blocks, dtype=torch.int32, device=device),
            )
        # 1. bool[Ck, most]: whether the i-th row of the block's span attends to it.
        place = torch.arange(self.most, device=device)
        row = (self.first[:, None] + place).clamp(max=len(table.bits) - 1)
        byte, bit = self.column // 8, (self.column % 8).to(torch.uint8)
        needed = (table.bits[row.long(), byte[:, None]] >> bit[:, None] & 1).bool() & (place < self.rows[:, None])
        # 2. As bits, they expand as the rows' own do: there is nothing short.
        count = needed.sum(dim=1, dtype=torch.int32)
        whole = torch.full((len(table.bits),), 1, dtype=torch.int32, device=device)
        rows = expand_rows(pack_bits(needed), self.first, whole, count, self.most, 1, batch)
        return TransposedTable(rows, count.repeat(batch))


def transposed_layouts(layout: TableLayout) -> tuple[TransposedLayout, ...]:
    """Returns for each chunk what the transposed tables of all masks under one plan share. Synchronises."""
    per_span = torch.bincount(layout.spans_of, minlength=layout.columns.shape[1])  # rows are packed span by span
    first = per_span.cumsum(0) - per_span
    most = int(per_span.max()) if len(per_span) else 0
    found = []
    for present in layout.present:
        span, column = present.nonzero(as_tuple=True)  # in packing order
        found.append(TransposedLayout(first[span].to(torch.int32), per_span[span], column, most))
    return tuple(found)
