"""Order in which a GPU starts rows, and cutting of long rows by keys, so that all rows end at about the same time.

A GPU computes as many rows at a time as it has *slots*: multiprocessors × programs on each / programs of a row. A row
processes its key blocks sequentially, so a long row or one that starts late delays the whole attention.
"""

from __future__ import annotations

import torch

from dbsp_kernels.row_parts import LEAST_BLOCKS, PART_BLOCKS, SHARES, SHORT, RowParts, most_added_parts

MOST_ROWS = 1 << 15  # with more rows, start them head by head: comparing all pairs would cost more than it gains


def order_rows(count: torch.Tensor, spans: torch.Tensor, slots: int, batch: int = 1) -> torch.Tensor:
    """Returns the order in which `batch` copies of rows start: int32[y, B · R], without host synchronization.

    Long rows of all heads start first and the lightest tenth of the work last. The others start head by head, so that
    a head's keys stay in the cache. Each group starts with its heaviest rows. count int32[y, R] has the blocks of each
    row in each chunk of keys, spans int64[R] its head, or the sequence of a head.
    """
    if batch * count.shape[1] > MOST_ROWS:
        count, span = count.repeat(1, batch), _spans_of_copies(spans, batch)
        return torch.argsort(_keys(span, count), dim=1, stable=True).to(torch.int32)
    if count.is_cuda:
        from dbsp_kernels.triton.schedule import triton_order_rows  # here: triton need not be installed

        return triton_order_rows(count, spans, slots, batch)
    count = count.repeat(1, batch)
    return _ordered(count, _spans_of_copies(spans, batch), slots)[0].to(torch.int32)


def cut_rows(
    count: torch.Tensor, full: torch.Tensor, spans: torch.Tensor, slots: int, batch: int = 1
) -> list[RowParts]:
    """Returns the rows of each chunk of keys in the order of `order_rows`, long ones cut into equal parts.

    The limit of a row is the remaining work per slot, rest / slots. No row is cut if uncut rows end little later than
    the mean slot: cutting equal rows would leave the last wave as empty. full int32[y, R] has the number of full
    blocks per row, which come first in its list.
    """
    if count.is_cuda:
        from dbsp_kernels.triton.schedule import triton_cut_rows  # here: triton need not be installed

        items, cuts = triton_cut_rows(count, full, spans, slots, batch)
    else:
        count, full = count.repeat(1, batch), full.repeat(1, batch)
        items, cuts = _cut(count, full, _spans_of_copies(spans, batch), slots)
    return [RowParts(*of_chunk) for of_chunk in zip(items, cuts, strict=True)]


def _spans_of_copies(spans: torch.Tensor, batch: int) -> torch.Tensor:
    """Returns int64[B · R], spans made distinct for each copy."""
    return (spans + (torch.arange(batch, device=spans.device) << 20)[:, None]).flatten()


def _keys(group: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    """Returns sort keys int64[y, n]: by group, heavy rows first."""
    return (group << 32) - count


def _ordered(count: torch.Tensor, spans: torch.Tensor, slots: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the order int64[y, n] and an upper bound int64[y, 1] on its time in blocks, wave by wave."""
    total = count.sum(dim=1, keepdim=True)
    # 1. Cumulative work of each row and all heavier rows
    heavy = count.argsort(dim=1, descending=True, stable=True)
    of_heavy = count.gather(1, heavy).long()
    done = torch.empty_like(of_heavy).scatter_(1, heavy, of_heavy.cumsum(1))
    # 2. Groups: long rows, then head by head, then the lightest
    group = torch.where(done > total - total // SHORT, 1 << 30, spans)
    group = torch.where(count.long() * SHORT * slots > total, -1, group)
    waves = of_heavy[:, ::slots].sum(dim=1, keepdim=True)
    return torch.argsort(_keys(group, count), dim=1, stable=True), waves


def _cut(
    count: torch.Tensor, full: torch.Tensor, spans: torch.Tensor, slots: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns items int32[y, n + E, 5] and cuts int32[y, E, 3] of `RowParts`."""
    order, waves = _ordered(count, spans, slots)
    count, full = count.gather(1, order).long(), full.gather(1, order).long()  # [y, n], in order
    total, done = count.sum(dim=1, keepdim=True), count.cumsum(1)
    before = done - count
    # 1. Number of parts per row
    least = (-(-total // (SHARES * slots))).clamp(min=LEAST_BLOCKS)
    limit = torch.maximum(-(-(total - before) // slots), least)
    parts = torch.minimum(-(-count // limit), count // LEAST_BLOCKS).clamp(min=1)
    # 2. Cut no row where uncut rows end little later than the mean slot with parts
    cost = PART_BLOCKS * torch.where(parts > 1, parts, 0).sum(dim=1, keepdim=True)
    latest = (before + slots * count).amax(dim=1, keepdim=True)
    whole = 2 * torch.minimum(latest, slots * waves) <= 2 * (total + cost) + slots * least
    parts = torch.where(whole, 1, parts)
    # 3. Items, the parts of a row next to each other
    chunks, rows, added = *count.shape, most_added_parts(slots)
    ends = parts.cumsum(1)
    item = torch.arange(rows + added, device=count.device).expand(chunks, -1).contiguous()
    at = torch.searchsorted(ends, item, right=True).clamp(max=rows - 1)
    part, blocks, of = item - (ends - parts).gather(1, at), count.gather(1, at), parts.gather(1, at)
    is_cut = torch.where(parts > 1, parts, 0)
    first_place = is_cut.cumsum(1) - is_cut
    start, stop = part * blocks // of, (part + 1) * blocks // of
    whole_blocks = torch.minimum((full.gather(1, at) - start).clamp(min=0), stop - start)
    place = torch.where(of > 1, first_place.gather(1, at) + part, -1)
    row = torch.where(part < of, order.gather(1, at), -1)
    # 4. Cut rows in order; the others go to an extra entry, dropped below
    number = torch.where(parts > 1, (parts > 1).cumsum(1) - 1, added)
    cuts = torch.zeros(chunks, added + 1, 3, dtype=torch.int32, device=count.device)
    of_row = torch.stack([order, first_place, parts], dim=2).to(torch.int32)
    cuts.scatter_(1, number[..., None].expand(-1, -1, 3), of_row)
    return torch.stack([row, start, stop - start, whole_blocks, place], dim=2).to(torch.int32), cuts[:, :added]
