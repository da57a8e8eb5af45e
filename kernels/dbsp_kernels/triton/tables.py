"""Triton kernels from masks to rows' bits, and from bits to the attention kernel's table."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dbsp_kernels.triton.launch import launch

CHUNK = 1024  # columns at a time


@triton.jit(do_not_specialize=range(10))  # all arguments but the constant
def expand_kernel(  # type: ignore[no-untyped-def]
    bits_ptr, base_ptr, length_ptr, bounds_ptr, full_ptr, index_ptr, rows, row_bytes, width, block,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Expands the bits of one row of one copy in one chunk of keys per program: full blocks first, then short ones."""
    copy = tl.program_id(1)
    chunk = tl.program_id(2)
    row = chunk.to(tl.int64) * rows + tl.program_id(0)
    base = tl.load(base_ptr + row)
    first = tl.load(bounds_ptr + chunk)
    blocks = tl.load(bounds_ptr + chunk + 1) - first
    length_ptr += first
    index_row = index_ptr + ((chunk.to(tl.int64) * tl.num_programs(1) + copy) * rows + tl.program_id(0)) * width
    full_position = 0
    short_position = tl.load(full_ptr + row)
    for start in range(0, width, CHUNK):
        column = start + tl.arange(0, CHUNK)
        byte = tl.load(bits_ptr + row * row_bytes + column // 8, mask=column < width, other=0).to(tl.int32)
        needed = (byte >> (column % 8)) & 1
        length = tl.load(length_ptr + base + column, mask=needed != 0, other=0)
        full = tl.where(length == block, needed, 0)
        short = needed - full
        position = tl.where(full != 0, full_position + tl.cumsum(full, 0), short_position + tl.cumsum(short, 0)) - 1
        tl.store(index_row + position, base + column + copy * blocks, mask=needed != 0)
        full_position += tl.sum(full, 0)
        short_position += tl.sum(short, 0)


@triton.jit(do_not_specialize=range(13))  # all arguments but the constant
def pack_kernel(  # type: ignore[no-untyped-def]
    mask_ptr, rows_ptr, spans_ptr, columns_ptr, present_ptr, full_ptr,
    bits_ptr, count_ptr, counted_ptr, mask_row, spans, width, row_bytes, CHUNK: tl.constexpr,
):  # fmt: skip
    """Packs one row of the mask in one chunk of keys per program."""
    row = tl.program_id(0)
    chunk = tl.program_id(1).to(tl.int64)
    position = chunk * tl.num_programs(0) + row
    mask_row_ptr = mask_ptr + tl.load(rows_ptr + row) * mask_row
    of_span = (chunk * spans + tl.load(spans_ptr + row)) * width
    count = 0
    counted = 0
    for start in range(0, width, CHUNK):
        column = start + tl.arange(0, CHUNK)
        there = column < width
        present = tl.load(present_ptr + of_span + column, mask=there, other=0) != 0
        block = tl.load(columns_ptr + of_span + column, mask=present, other=0)
        needed = tl.load(mask_row_ptr + block, mask=present, other=0).to(tl.int32)
        full = tl.load(full_ptr + of_span + column, mask=there, other=0).to(tl.int32)
        count += tl.sum(needed, 0)
        counted += tl.sum(needed * full, 0)
        packed = tl.sum(tl.reshape(needed << (column % 8), [CHUNK // 8, 8]), 1)
        byte = start // 8 + tl.arange(0, CHUNK // 8)
        tl.store(bits_ptr + position * row_bytes + byte, packed.to(tl.uint8), mask=byte < row_bytes)
    tl.store(count_ptr + position, count)
    tl.store(counted_ptr + position, counted)


def triton_pack_rows(
    mask: torch.Tensor,
    rows: torch.Tensor,
    spans: torch.Tensor,
    columns: torch.Tensor,
    present: torch.Tensor,
    full: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Implements the contract of `dbsp_kernels.tables.pack_rows`, for columns in any order."""
    mask = mask[:, None] if mask.ndim == 1 else mask if mask.stride(1) == 1 else mask.contiguous()
    (chunks, all_spans, width), count = columns.shape, rows.shape[0]
    bits = rows.new_empty(chunks, count, -(-width // 8), dtype=torch.uint8)
    counts, counted = rows.new_empty(2, chunks, count, dtype=torch.int32).unbind(0)
    if bits.numel():
        launch(
            pack_kernel, (count, chunks),
            mask, rows, spans, columns, present, full, bits, counts, counted,
            mask.stride(0), all_spans, width, bits.shape[2], CHUNK=CHUNK, num_warps=4,
        )  # fmt: skip
    else:
        counts.zero_(), counted.zero_()
    return bits, counts, counted


def triton_expand_rows(
    bits: torch.Tensor,
    base: torch.Tensor,
    kv_len: torch.Tensor,
    bounds: torch.Tensor,
    kv_full: torch.Tensor,
    width: int,
    block: int,
    batch: int,
) -> torch.Tensor:
    """Implements the contract of `dbsp_kernels.tables.expand_rows`."""
    chunks, rows, row_bytes = bits.shape
    index = torch.empty(chunks, batch * rows, width, dtype=torch.int32, device=bits.device)
    if index.numel():
        launch(
            expand_kernel, (rows, batch, chunks),
            bits, base, kv_len, bounds, kv_full, index, rows, row_bytes, width, block,
            CHUNK=CHUNK, num_warps=4,
        )  # fmt: skip
    return index
