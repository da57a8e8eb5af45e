"""Kernel tables: from mask bits to the packed KV blocks that each of a rank's rows attends to, chunk by chunk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch

from dbsp_core.masks.block_mask import BlockMask, row_positions
from dbsp_core.planning.chunks import columns_of_heads
from dbsp_core.planning.plan import Plan
from dbsp_kernels import DensePart
from dbsp_kernels.inputs import TransposedTable
from dbsp_kernels.row_parts import LEAST_BLOCKS, RowParts
from dbsp_kernels.schedule import cut_rows, order_rows
from dbsp_kernels.segments import to_device
from dbsp_kernels.tables import expand_rows, pack_bits, pack_rows


@dataclass(eq=False, repr=False)  # not frozen, like `KernelInputs`
class KernelTable:
    """Kernel tables of one chunk; see `dbsp_kernels.block_attention`."""

    kv_index: torch.Tensor  # int32[B·Rq, width]
    kv_count: torch.Tensor  # int32[B·Rq]
    kv_len: torch.Tensor  # int32[B·Ck]
    kv_full: torch.Tensor  # int32[B·Rq]
    row_schedule: torch.Tensor | None = None  # int32[B·Rq]
    parts: RowParts | None = None


@dataclass(frozen=True, eq=False, repr=False)
class DenseRows:
    """Rows of fully dense heads (or their sequences) in one chunk."""

    parts: tuple[DensePart, ...]  # groups of heads of equal size
    every: bool  # True if all rows of this rank are dense


@dataclass(frozen=True, eq=False, repr=False)
class ChunkTables:
    """Compact tables of all chunks: each row's blocks as bits (`pack_bits`)."""

    layout: TableLayout  # Part of the tables common to all masks
    # uint8[y, Rq, ceil(width / 8)]; row r attends to packed block base[r] + j of the chunk if bit j is set
    bits: torch.Tensor
    # kv_count, kv_full: int32[y, Rq], number of blocks and of full blocks per row
    kv_count: torch.Tensor
    kv_full: torch.Tensor
    dense: tuple[DenseRows | None, ...]  # Per chunk, rows for torch's dense kernels; None: none, or unknown
    others: torch.Tensor | None = None  # int32[y, Rq], 0 for dense rows, 1 for others; None if no chunk has dense rows
    # Cached counts, orders and parts of rows, by the arguments of `expanded`
    scheduled: dict[tuple[int, int | None, bool, bool], tuple[Any, ...]] = field(default_factory=dict)

    @classmethod
    def none(cls, layout: TableLayout) -> ChunkTables:
        """Returns empty tables, for an attention without mask."""
        nothing = layout.rows.new_empty(0)
        return cls(layout, nothing, nothing, nothing, ())

    def expanded(
        self, batch: int = 1, slots: int | None = None, *, cut: bool = False, dense: bool = False
    ) -> list[KernelTable]:
        """Returns the kernel tables per chunk for `batch` copies of the rows; copy b attends to copy b of the blocks.

        Args:
            slots: Rows that the device computes at a time. None: unknown, so the kernel orders rows.
            cut: True to cut long rows, for kernels with `slots`.
            dense: True if dense rows are computed elsewhere and list no blocks here.
        """
        layout, count, full = self.layout, self.kv_count, self.kv_full
        # 1. Lists of all chunks at once: [y, B·Rq, width]
        index = expand_rows(
            self.bits, layout.base, layout.kv_len, layout.bounds, full, layout.width, layout.block_k, batch
        )
        # 2. Counts, and the order or parts of rows, cached for the next call with this mask
        key = batch, slots, cut, dense
        if key not in self.scheduled:
            if dense and self.others is not None:
                count, full = count * self.others, full * self.others
            orders: Sequence[torch.Tensor | None] = [None] * len(count)
            parts: Sequence[RowParts | None] = [None] * len(count)
            if slots is not None and cut and layout.width >= 2 * LEAST_BLOCKS:  # shorter rows are never cut
                parts = cut_rows(count, full, layout.spans_of, slots, batch)
            elif slots is not None:
                orders = order_rows(count, layout.spans_of, slots, batch).unbind(0)
            if batch > 1:
                count, full = count.repeat(1, batch), full.repeat(1, batch)
            self.scheduled[key] = count, full, orders, parts
        # 3. One table per chunk
        lengths = layout.lengths if batch == 1 else [length.repeat(batch) for length in layout.lengths]
        count, full, *starts = self.scheduled[key]
        return [KernelTable(*of_chunk) for of_chunk in zip(index, count, lengths, full, *starts, strict=True)]


class Span(NamedTuple):
    """The packed rows and blocks of one sequence of one head, which attend only to each other."""

    number: int  # head · sequences + sequence
    rows: tuple[int, int]  # half-open range of packed rows
    blocks: tuple[int, int]  # half-open range of packed blocks
    lengths: np.ndarray  # int64, tokens of each block


@dataclass(frozen=True, eq=False, repr=False)
class TableLayout:
    """Part of one rank's kernel tables common to all masks under one plan.

    The rank's spans are the sequences (one if not packed) of the heads whose keys it receives.
    """

    spans_of: torch.Tensor  # int64[Rq], span of each row
    rows: torch.Tensor  # int64[Rq], position of each row in the mask's `row_bits`
    number: torch.Tensor  # int64[Rq], head · nq + query block of each row
    # int64[chunks, spans, width], KV block (within its sequence) of each column, in packing order
    columns: torch.Tensor
    present: torch.Tensor  # bool[chunks, spans, width], True if the column has a block
    full: torch.Tensor  # bool[chunks, spans, width], True if that block is full
    base: torch.Tensor  # int32[chunks, Rq], packed block of each row's column 0, relative to the chunk's first block
    kv_len: torch.Tensor  # int32[ΣCk], tokens of each packed block, chunk by chunk
    bounds: torch.Tensor  # int32[chunks + 1], start of each chunk's blocks, and the end of the last
    blocks: list[int]  # Ck, by chunk
    spans: tuple[tuple[Span, ...], ...]  # Per chunk, on the host, the spans with rows
    block_k: int
    head_tokens: int | None  # See `whole_head_tokens`

    @cached_property
    def width(self) -> int:
        return self.columns.shape[2]

    @cached_property
    def lengths(self) -> tuple[torch.Tensor, ...]:
        """Tokens of each packed block, int32[Ck] per chunk."""
        return self.kv_len.split(self.blocks)

    def to(self, device: torch.device) -> TableLayout:
        """Returns a copy with tables on `device` (spans stay on the CPU); tables of `self` must be on the CPU."""
        if device == self.rows.device:
            return self
        tables = {name: value for name, value in vars(self).items() if isinstance(value, torch.Tensor)}
        moved: dict[str, Any] = {name: to_device(table, device) for name, table in tables.items()}
        return replace(self, **moved)

    @cached_property
    def transposed(self) -> tuple[TransposedLayout, ...]:
        """Transposed tables of each chunk, for backward; made at first use, which synchronizes."""
        per_span = torch.bincount(self.spans_of, minlength=self.columns.shape[1])  # rows are packed span by span
        first = per_span.cumsum(0) - per_span
        most = int(per_span.max()) if len(per_span) else 0
        bounds = torch.tensor([0, len(self.rows)], dtype=torch.int32, device=self.rows.device)
        by_chunk = []
        for present in self.present:
            span, column = present.nonzero(as_tuple=True)  # in packing order
            by_chunk.append(TransposedLayout(span, first[span].to(torch.int32), per_span[span], column, bounds, most))
        return tuple(by_chunk)


def table_layout(plan: Plan, rank: int) -> TableLayout:
    """Builds one rank's table layout on the host."""
    grid, axis, sequences = plan.grid, plan.grid.k_axis, len(plan.grid.sequences)
    packed = plan.chunks.blocks_for(rank)
    # 1. Spans of the rank, and the span of each row
    here = np.flatnonzero(columns_of_heads(plan.owner, plan.strategy.ulysses)[:, rank % plan.strategy.ulysses])
    local_head = np.zeros(plan.heads, dtype=np.int64)
    local_head[here] = np.arange(len(here))
    numbers = (here[:, None] * sequences + np.arange(sequences)).ravel()
    head, block = plan.rows_of(rank)
    row_span = local_head[head] * sequences + grid.q_axis.sequence_of[block]
    rows, number = row_positions(grid, plan.heads, head, block), head * grid.nq + block
    # 2. Columns: blocks are packed by head and sequence, so the blocks of a span are adjacent
    of_blocks = (local_head[head] * sequences + axis.sequence_of[block] for head, block in packed)
    per_span = np.stack([np.bincount(span, minlength=len(numbers)) for span in of_blocks])  # int64[chunks, spans]
    first = np.cumsum(per_span, axis=1) - per_span
    width = max(1, int(per_span.max(initial=0)))
    width += -width % 8  # whole bytes of bits
    # 3. Arrays by chunk and span, in packing order
    present = np.arange(width) < per_span[..., None]
    block, blocks = np.concatenate([block for _, block in packed]), [len(block) for _, block in packed]
    columns, full = np.zeros(present.shape, dtype=np.int64), np.zeros(present.shape, dtype=bool)
    columns[present] = block - axis.bounds[axis.sequence_of[block]]
    full[present] = axis.lengths[block] == axis.block
    return TableLayout(
        spans_of=torch.from_numpy(row_span),
        rows=torch.from_numpy(rows),
        number=torch.from_numpy(number),
        columns=torch.from_numpy(columns),
        present=torch.from_numpy(present),
        full=torch.from_numpy(full),
        base=torch.from_numpy(first.astype(np.int32).take(row_span, axis=1)),
        kv_len=torch.from_numpy(axis.lengths[block].astype(np.int32)),
        bounds=torch.from_numpy(np.cumsum([0, *blocks], dtype=np.int32)),
        blocks=blocks,
        spans=tuple(
            _spans(numbers, row_span, start, count, axis.lengths[of_chunk])
            for start, count, (_, of_chunk) in zip(first, per_span, packed, strict=True)
        ),
        block_k=axis.block,
        head_tokens=whole_head_tokens(plan),
    )


def _spans(
    number: np.ndarray, row_span: np.ndarray, first: np.ndarray, count: np.ndarray, lengths: np.ndarray
) -> tuple[Span, ...]:
    """Makes the spans with rows from each span's number, first packed block and number of blocks, int64[spans]."""
    having_rows, start = np.unique(row_span, return_index=True)
    stop = np.append(start, len(row_span))[1:]
    return tuple(
        Span(int(number[span]), (int(a), int(b)), (int(c), int(c + n)), lengths[c : c + n])
        for span, a, b, c, n in zip(having_rows, start, stop, first[having_rows], count[having_rows], strict=True)
    )


def dense_spans_of(mask: BlockMask, device: torch.device) -> np.ndarray | None:
    """Returns bool[H · S], True for fully dense sequences of heads; None if this would synchronize with the device."""
    if mask.bits.device.type != "cpu" or device.type != "cuda":
        return None
    dense: np.ndarray = torch.stack([part.bits.flatten(1).all(dim=1) for part in mask.parts], dim=1).flatten().numpy()
    return dense


def build_tables(layout: TableLayout, mask: BlockMask, dense_spans: np.ndarray | None = None) -> ChunkTables:
    """Builds the tables of all chunks, on the layout's device, for a mask on the plan's grid; see `dense_spans_of`."""
    bits = to_device(mask.row_bits, layout.rows.device)
    of_mask = layout.columns, layout.present, layout.full
    tables = ChunkTables(
        layout, *pack_rows(bits, layout.rows, layout.spans_of, *of_mask), (None,) * len(layout.blocks)
    )
    if dense_spans is None or not dense_spans.any():
        return tables
    device = layout.rows.device
    dense, others = zip(*(_dense_rows(layout, spans, dense_spans) for spans in layout.spans), strict=True)
    return replace(tables, dense=dense, others=to_device(np.stack(others), device)) if any(dense) else tables


def _dense_rows(
    layout: TableLayout, spans: tuple[Span, ...], dense_spans: np.ndarray
) -> tuple[DenseRows | None, np.ndarray]:
    """Returns the dense rows of one chunk, and int32[Rq] that is 0 for dense rows, else 1.

    Excludes spans of less than two tokens, which cuDNN rejects.
    """
    others = np.ones(len(layout.rows), dtype=np.int32)
    groups: dict[tuple[int, bytes], list[list[Span]]] = {}
    # 1. Group evenly spaced spans of equal size
    for span in spans:
        if not dense_spans[span.number] or span.lengths.sum() < 2:
            continue
        others[slice(*span.rows)] = 0
        of_size = groups.setdefault((span.rows[1] - span.rows[0], span.lengths.tobytes()), [])
        if of_size and _continues(of_size[-1], span):
            of_size[-1].append(span)
        else:
            of_size.append([span])
    # 2. Mark the other rows, which the block kernel computes
    parts = tuple(_dense_part(group, layout) for of_size in groups.values() for group in of_size)
    return (DenseRows(parts, not others.any()) if parts else None), others


def _continues(group: list[Span], span: Span) -> bool:
    """Returns True if a span continues a group's even spacing."""

    def distance(a: Span, b: Span) -> tuple[int, int]:
        return b.rows[0] - a.rows[0], b.blocks[0] - a.blocks[0]

    first, second, *_ = (*group, span)
    return distance(group[-1], span) == distance(first, second)


def _dense_part(group: list[Span], layout: TableLayout) -> DensePart:
    """Makes the `DensePart` of a group of spans."""

    def starts(of_spans: list[int], count: int) -> range:
        step = of_spans[1] - of_spans[0] if len(of_spans) > 1 else count
        return range(of_spans[0], of_spans[-1] + 1, step)

    first, tokens = group[0], None
    slot, rows, blocks = np.arange(layout.block_k), first.rows[1] - first.rows[0], len(first.lengths)
    if (first.lengths < layout.block_k).any():
        tokens = to_device(np.flatnonzero(slot < first.lengths[:, None]), layout.rows.device)
    return DensePart(
        row_starts=starts([span.rows[0] for span in group], rows),
        rows=rows,
        block_starts=starts([span.blocks[0] for span in group], blocks),
        blocks=blocks,
        tokens=tokens,
    )


def whole_head_tokens(plan: Plan) -> int | None:
    """Returns the tokens per head if every rank's rows are exactly those of whole heads, else None."""
    grid = plan.grid
    if plan.strategy.ring > 1 or plan.split_heads or not grid.only_last_is_short:
        return None
    if not plan.chunks.sends_every_block:  # blocks that no rank needs are missing
        return None
    return grid.tokens


@dataclass(frozen=True, eq=False)
class TransposedLayout:
    """The rows of each packed block's span in one chunk, which are adjacent."""

    span: torch.Tensor  # int64[Ck]
    first: torch.Tensor  # int32[Ck], first row
    rows: torch.Tensor  # int64[Ck], number of rows
    column: torch.Tensor  # int64[Ck], the block's column in these rows
    bounds: torch.Tensor  # int32[2], 0 and Rq
    most: int  # most rows of a span

    def table(self, bits: torch.Tensor, batch: int, slots: int | None) -> TransposedTable:
        """Returns the rows that attend to each block, for `batch` copies, without synchronizing.

        `bits` are the chunk's, uint8[Rq, ceil(width / 8)]; for `slots` see `ChunkTables.expanded`.
        """
        blocks, device = len(self.first), bits.device
        if not blocks or not self.most:
            nothing = torch.zeros(batch * blocks, 1, dtype=torch.int32, device=device)
            return nothing, nothing[:, 0], None
        # 1. bool[Ck, most]: True if the i-th row of the block's span attends to it
        local_head = torch.arange(self.most, device=device)
        row = (self.first[:, None] + local_head).clamp(max=len(bits) - 1)
        byte, bit = self.column // 8, (self.column % 8).to(torch.uint8)
        needed = (bits[row.long(), byte[:, None]] >> bit[:, None] & 1).bool() & (local_head < self.rows[:, None])
        # 2. Pack to bits and expand like rows' tables, without short blocks
        count = needed.sum(dim=1, dtype=torch.int32)[None]
        whole = torch.full((len(bits),), 1, dtype=torch.int32, device=device)
        of_blocks = pack_bits(needed)[None], self.first[None], whole, self.bounds, count
        (rows,) = expand_rows(*of_blocks, self.most, 1, batch)
        order = None if slots is None else order_rows(count, self.span, slots, batch)[0]
        return rows, count[0].repeat(batch), order
