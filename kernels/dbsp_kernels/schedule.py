"""The order in which a GPU starts rows, and long rows cut by keys: so that nothing is waited for at the end.

A GPU computes so many rows at a time as it has *slots*: multiprocessors × programs on each / programs of a row. A row
takes its key blocks one after another, so one that starts late, or is long, keeps the others waiting.
"""

from __future__ import annotations

import torch

from dbsp_kernels.row_parts import LEAST_BLOCKS, PART_BLOCKS, SHARES, SHORT, RowParts, most_added_parts

MOST_ROWS = 1 << 15  # Above, rows just start head by head: each is compared with each, and a slot has many


def order_rows(count: torch.Tensor, spans: torch.Tensor, slots: int, batch: int = 1) -> torch.Tensor:
    """Returns the order in which rows start: int32[y, B · R], on their device, without a host synchronisation.

    Long rows of all heads start first, and the lightest tenth of the work last. The others start head by head, so that
    a head's keys stay in the cache while its rows run. Heavy rows are the first of each group.

    Args:
        count: int32[y, R], blocks of each row in each chunk of keys.
        spans: int64[R], the head of each row, or the sequence of a head.
        slots: Rows that the GPU computes at a time.
        batch: Copies of the rows, which start together.
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
    """Returns the rows in the order of `order_rows`, in each chunk of keys, long ones cut into equal parts.

    A row may be as long as what is left for a slot from it on, rest / slots. Where the rows as they are end little
    later than the mean slot, none is cut: of equal rows parts would fill a last wave as badly.

    Args:
        full: int32[y, R], how many of a row's blocks are not short; a list has them first.
        count, spans, slots, batch: See `order_rows`.
    """
    if count.is_cuda:
        from dbsp_kernels.triton.schedule import triton_cut_rows  # here: triton need not be installed

        items, cuts = triton_cut_rows(count, full, spans, slots, batch)
    else:
        count, full = count.repeat(1, batch), full.repeat(1, batch)
        items, cuts = _cut(count, full, _spans_of_copies(spans, batch), slots)
    return [RowParts(*of_chunk) for of_chunk in zip(items, cuts, strict=True)]


def _spans_of_copies(spans: torch.Tensor, batch: int) -> torch.Tensor:
    """Returns int64[B · R], with spans of its own in each copy."""
    return (spans + (torch.arange(batch, device=spans.device) << 20)[:, None]).flatten()


def _keys(group: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    """Returns int64[y, n], by which rows are sorted: by group, heavy ones first."""
    return (group << 32) - count


def _ordered(count: torch.Tensor, spans: torch.Tensor, slots: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns int64[y, n], the order, and int64[y, 1], a bound on the time that the rows take in it: of waves."""
    total = count.sum(dim=1, keepdim=True)
    # 1. The work of each row and all heavier ones.
    heavy = count.argsort(dim=1, descending=True, stable=True)
    of_heavy = count.gather(1, heavy).long()
    done = torch.empty_like(of_heavy).scatter_(1, heavy, of_heavy.cumsum(1))
    # 2. Long rows, head by head the others, and the lightest.
    group = torch.where(done > total - total // SHORT, 1 << 30, spans)
    group = torch.where(count.long() * SHORT * slots > total, -1, group)
    waves = of_heavy[:, ::slots].sum(dim=1, keepdim=True)
    return torch.argsort(_keys(group, count), dim=1, stable=True), waves


def _cut(
    count: torch.Tensor, full: torch.Tensor, spans: torch.Tensor, slots: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns int32[y, n + E, 5] and int32[y, E, 3], the items and cuts of `RowParts`."""
    order, waves = _ordered(count, spans, slots)
    count, full = count.gather(1, order).long(), full.gather(1, order).long()  # [y, n], in order
    total, done = count.sum(dim=1, keepdim=True), count.cumsum(1)
    before = done - count
    # 1. How many parts each row has.
    least = (-(-total // (SHARES * slots))).clamp(min=LEAST_BLOCKS)
    limit = torch.maximum(-(-(total - before) // slots), least)
    parts = torch.minimum(-(-count // limit), count // LEAST_BLOCKS).clamp(min=1)
    # 2. None is cut where the rows end little later than the mean slot with parts.
    cost = PART_BLOCKS * torch.where(parts > 1, parts, 0).sum(dim=1, keepdim=True)
    latest = (before + slots * count).amax(dim=1, keepdim=True)
    whole = 2 * torch.minimum(latest, slots * waves) <= 2 * (total + cost) + slots * least
    parts = torch.where(whole, 1, parts)
    # 3. The items: parts of a row follow one another.
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
    # 4. The rows that are cut, in order; the others are written to one beyond the end, which is left out.
    number = torch.where(parts > 1, (parts > 1).cumsum(1) - 1, added)
    cuts = torch.zeros(chunks, added + 1, 3, dtype=torch.int32, device=count.device)
    of_row = torch.stack([order, first_place, parts], dim=2).to(torch.int32)
    cuts.scatter_(1, number[..., None].expand(-1, -1, 3), of_row)
    return torch.stack([row, start, stop - start, whole_blocks, place], dim=2).to(torch.int32), cuts[:, :added]
