"""Triton kernels that order rows and cut long ones, by comparing all pairs of rows instead of sorting.

Three launches for all chunks of keys: sort keys, positions by these keys, items.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dbsp_kernels.row_parts import LEAST_BLOCKS, PART_BLOCKS, SHARES, SHORT, most_added_parts
from dbsp_kernels.triton.launch import launch

TILE = 32  # rows per program
STEP = 64  # rows to compare with at a time


@triton.jit
def _precedes(of_other, of_row, other, row):  # type: ignore[no-untyped-def]
    """Returns bool[STEP, TILE]: True if the other row has the smaller key, or an equal key and comes first."""
    less, equal = of_other[:, None] < of_row[None, :], of_other[:, None] == of_row[None, :]
    return less | (equal & (other[:, None] < row[None, :]))


@triton.jit(do_not_specialize=range(7))  # all arguments but the constants
def key_kernel(  # type: ignore[no-untyped-def]
    count_ptr, spans_ptr, key_ptr, wave_ptr, rows, all_rows, slots,
    SHORT: tl.constexpr, TILE: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Writes the sort keys of TILE rows in one chunk, and the blocks of rows that begin a wave."""
    chunk = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    there = row < all_rows
    count_ptr += chunk * rows
    count = tl.load(count_ptr + row % rows, mask=there, other=0)
    total = tl.zeros([STEP], tl.int32)
    before, rank = tl.zeros([STEP, TILE], tl.int32), tl.zeros([STEP, TILE], tl.int32)
    for first in range(0, all_rows, STEP):
        other = first + tl.arange(0, STEP)
        of_other = tl.load(count_ptr + other % rows, mask=other < all_rows, other=-1)
        heavier = _precedes(-of_other, -count, other, row)
        before += tl.where(heavier, of_other[:, None], 0)
        rank += heavier.to(tl.int32)
        total += tl.maximum(of_other, 0)
    work = tl.sum(total, 0)
    done = tl.sum(before, 0) + count
    group = (row // rows).to(tl.int64) * (1 << 20) + tl.load(spans_ptr + row % rows, mask=there, other=0)
    group = tl.where(done > work - work // SHORT, 1 << 30, group)
    group = tl.where(count * SHORT * slots > work, -1, group)
    at = chunk * all_rows + row
    tl.store(key_ptr + at, group * 4294967296 - count, mask=there)
    tl.store(wave_ptr + at, tl.where(tl.sum(rank, 0) % slots == 0, count, 0), mask=there)


@triton.jit
def _earlier(key_ptr, key, row, other, all_rows):  # type: ignore[no-untyped-def]
    """Returns bool[STEP, TILE]: True if the other row starts earlier."""
    of_other = tl.load(key_ptr + other, mask=other < all_rows, other=0)
    return _precedes(of_other, key, other, row) & (other < all_rows)[:, None]


@triton.jit(do_not_specialize=range(10))  # all arguments but the constants
def position_kernel(  # type: ignore[no-untyped-def]
    key_ptr, count_ptr, order_ptr, position_ptr, parts_ptr, end_ptr, rows, all_rows, slots, least_blocks,
    SHARES: tl.constexpr, CUT: tl.constexpr, TILE: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Writes the order of TILE rows in one chunk; if CUT, their positions, numbers of parts and latest ends."""
    chunk = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    there = row < all_rows
    count_ptr += chunk * rows
    key_ptr += chunk * all_rows
    key = tl.load(key_ptr + row, mask=there, other=0)
    total = tl.zeros([STEP], tl.int32)
    before, rank = tl.zeros([STEP, TILE], tl.int32), tl.zeros([STEP, TILE], tl.int32)
    for first in range(0, all_rows, STEP):
        other = first + tl.arange(0, STEP)
        earlier = _earlier(key_ptr, key, row, other, all_rows)
        rank += earlier.to(tl.int32)
        if CUT:
            of_other = tl.load(count_ptr + other % rows, mask=other < all_rows, other=0)
            before += tl.where(earlier, of_other[:, None], 0)
            total += of_other
    position, at = tl.sum(rank, 0), chunk * all_rows + row
    if CUT:
        count = tl.load(count_ptr + row % rows, mask=there, other=0)
        work, done = tl.sum(total, 0), tl.sum(before, 0)
        limit = tl.maximum(tl.cdiv(work - done, slots), tl.maximum(tl.cdiv(work, SHARES * slots), least_blocks))
        parts = tl.maximum(tl.minimum(tl.cdiv(count, limit), count // least_blocks), 1)
        tl.store(position_ptr + at, position, mask=there)
        tl.store(parts_ptr + at, parts, mask=there)
        tl.store(end_ptr + at, done + slots * count, mask=there)
    else:
        tl.store(order_ptr + chunk * all_rows + position, row, mask=there)


@triton.jit(do_not_specialize=range(14))  # all arguments but the constants
def items_kernel(  # type: ignore[no-untyped-def]
    key_ptr, count_ptr, full_ptr, wave_ptr, position_ptr, parts_ptr, end_ptr, items_ptr, cuts_ptr,
    rows, all_rows, added, slots, least_blocks,
    SHARES: tl.constexpr, PART_BLOCKS: tl.constexpr, TILE: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Writes the items and cuts of TILE rows in one chunk."""
    chunk = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    there = row < all_rows
    count_ptr += chunk * rows
    full_ptr += chunk * rows
    key_ptr += chunk * all_rows
    parts_ptr += chunk * all_rows
    items_ptr += chunk * (all_rows + added) * 5
    cuts_ptr += chunk * added * 3
    at = chunk * all_rows
    # 1. Totals of all rows and of those that start earlier
    key = tl.load(key_ptr + row, mask=there, other=0)
    total, end, waves = tl.zeros([STEP], tl.int32), tl.zeros([STEP], tl.int32), tl.zeros([STEP], tl.int32)
    of_cut, all_parts, all_cuts = tl.zeros([STEP], tl.int32), tl.zeros([STEP], tl.int32), tl.zeros([STEP], tl.int32)
    before, cut_before = tl.zeros([STEP, TILE], tl.int32), tl.zeros([STEP, TILE], tl.int32)
    cuts = tl.zeros([STEP, TILE], tl.int32)
    for first in range(0, all_rows, STEP):
        other = first + tl.arange(0, STEP)
        inside = other < all_rows
        earlier = _earlier(key_ptr, key, row, other, all_rows)
        of_other = tl.load(parts_ptr + other, mask=inside, other=0)
        is_cut = of_other > 1
        before += tl.where(earlier, (of_other - 1)[:, None], 0)
        cut_before += tl.where(earlier & is_cut[:, None], of_other[:, None], 0)
        cuts += (earlier & is_cut[:, None]).to(tl.int32)
        all_parts += of_other
        of_cut += tl.where(is_cut, of_other, 0)
        all_cuts += is_cut.to(tl.int32)
        total += tl.load(count_ptr + other % rows, mask=inside, other=0)
        end = tl.maximum(end, tl.load(end_ptr + at + other, mask=inside, other=0))
        waves += tl.load(wave_ptr + at + other, mask=inside, other=0)
    # 2. Cut no row where uncut rows end little later than the mean slot with parts
    work, cost = tl.sum(total, 0), PART_BLOCKS * tl.sum(of_cut, 0)
    least = tl.maximum(tl.cdiv(work, SHARES * slots), least_blocks)
    whole = 2 * tl.minimum(tl.max(end, 0), slots * tl.sum(waves, 0)) <= 2 * (work + cost) + slots * least
    parts = tl.load(parts_ptr + row, mask=there, other=0)
    if whole:
        parts = tl.minimum(parts, 1)
    item = tl.load(position_ptr + at + row, mask=there, other=0) + tl.where(whole, 0, tl.sum(before, 0))
    place = tl.sum(cut_before, 0)
    number = tl.sum(cuts, 0)
    # 3. Items, one part of each row at a time
    count = tl.load(count_ptr + row % rows, mask=there, other=0)
    full = tl.load(full_ptr + row % rows, mask=there, other=0)
    is_cut = parts > 1
    for part in range(tl.max(parts, 0)):
        inside = part < parts
        of = tl.maximum(parts, 1)
        start = part * count // of
        blocks = (part + 1) * count // of - start
        to = items_ptr + (item + part) * 5
        tl.store(to, row, mask=inside)
        tl.store(to + 1, start, mask=inside)
        tl.store(to + 2, blocks, mask=inside)
        tl.store(to + 3, tl.minimum(tl.maximum(full - start, 0), blocks), mask=inside)
        tl.store(to + 4, tl.where(is_cut, place + part, -1), mask=inside)
    tl.store(cuts_ptr + number * 3, row, mask=is_cut)
    tl.store(cuts_ptr + number * 3 + 1, place, mask=is_cut)
    tl.store(cuts_ptr + number * 3 + 2, parts, mask=is_cut)
    # 4. Mark unused items and cuts
    if tl.program_id(0) == 0:
        used, used_cuts = tl.sum(all_parts, 0), tl.sum(all_cuts, 0)
        if whole:
            used, used_cuts = all_rows, 0
        for first in range(used, all_rows + added, STEP):
            other = first + tl.arange(0, STEP)
            tl.store(items_ptr + other * 5, -1, mask=other < all_rows + added)
        for first in range(used_cuts, added, STEP):
            other = first + tl.arange(0, STEP)
            tl.store(cuts_ptr + other * 3 + 2, 0, mask=other < added)


def _keys(count: torch.Tensor, spans: torch.Tensor, slots: int, batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the rows' sort keys int64[y, B · R], and the blocks of those that begin a wave int32[y, B · R]."""
    chunks, rows = count.shape
    keys = torch.empty(chunks, batch * rows, dtype=torch.int64, device=count.device)
    waves = torch.empty(chunks, batch * rows, dtype=torch.int32, device=count.device)
    launch(
        key_kernel, (-(-batch * rows // TILE), chunks),
        count, spans, keys, waves, rows, batch * rows, slots,
        SHORT=SHORT, TILE=TILE, STEP=STEP, num_warps=4,
    )  # fmt: skip
    return keys, waves


def triton_order_rows(count: torch.Tensor, spans: torch.Tensor, slots: int, batch: int) -> torch.Tensor:
    """Implements the contract of `dbsp_kernels.schedule.order_rows`."""
    chunks, rows = count.shape
    order = torch.empty(chunks, batch * rows, dtype=torch.int32, device=count.device)
    if order.numel():
        keys, _ = _keys(count, spans, slots, batch)
        launch(
            position_kernel, (-(-batch * rows // TILE), chunks),
            keys, count, order, order, order, order, rows, batch * rows, slots, LEAST_BLOCKS,
            SHARES=SHARES, CUT=False, TILE=TILE, STEP=STEP, num_warps=4,
        )  # fmt: skip
    return order


def triton_cut_rows(
    count: torch.Tensor, full: torch.Tensor, spans: torch.Tensor, slots: int, batch: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Implements the contract of `dbsp_kernels.schedule.cut_rows`: items int32[y, n, 5], cuts int32[y, E, 3]."""
    chunks, rows = count.shape
    all_rows, added = batch * rows, most_added_parts(slots)
    items = torch.empty(chunks, all_rows + added, 5, dtype=torch.int32, device=count.device)
    cuts = torch.empty(chunks, added, 3, dtype=torch.int32, device=count.device)
    if all_rows == 0:
        return items.fill_(-1), cuts.zero_()
    grid = (-(-all_rows // TILE), chunks)
    keys, waves = _keys(count, spans, slots, batch)
    positions, parts, ends = torch.empty(3, chunks, all_rows, dtype=torch.int32, device=count.device)
    launch(
        position_kernel, grid,
        keys, count, positions, positions, parts, ends, rows, all_rows, slots, LEAST_BLOCKS,
        SHARES=SHARES, CUT=True, TILE=TILE, STEP=STEP, num_warps=4,
    )  # fmt: skip
    launch(
        items_kernel, grid,
        keys, count, full, waves, positions, parts, ends, items, cuts, rows, all_rows, added, slots, LEAST_BLOCKS,
        SHARES=SHARES, PART_BLOCKS=PART_BLOCKS, TILE=TILE, STEP=STEP, num_warps=4,
    )  # fmt: skip
    return items, cuts
