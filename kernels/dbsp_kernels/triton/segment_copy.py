"""Copying segments of tokens, as a Triton kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dbsp_kernels.triton.tile_config import padded

__all__ = ["copy_kernel", "triton_copy_segments"]

ELEMENTS = 8192  # per program and step: 8 loads of 16 bytes in flight for each of 128 threads, in 16 bits


@triton.jit
def copy_kernel(  # type: ignore[no-untyped-def]
    from_ptr, to_ptr, table_ptr, segments,
    from_batch, from_head_stride, from_token_stride, from_width, to_batch, to_head_stride, to_token_stride, to_width,
    WIDTH: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, TILE_D: tl.constexpr,
    ADD: tl.constexpr,
):  # fmt: skip
    """ROWS tokens at a time: TOKENS of each of ROWS / TOKENS segments, of one element of the batch."""
    row = tl.arange(0, ROWS)
    segment = tl.program_id(0) * (ROWS // TOKENS) + row // TOKENS
    batch = tl.program_id(1).to(tl.int64)
    there = segment < segments
    entry = table_ptr + segment.to(tl.int64) * 6
    from_head = tl.load(entry, mask=there, other=0).to(tl.int64)
    from_token = tl.load(entry + 1, mask=there, other=0).to(tl.int64)
    to_head = tl.load(entry + 2, mask=there, other=0).to(tl.int64)
    to_token = tl.load(entry + 3, mask=there, other=0).to(tl.int64)
    length = tl.load(entry + 4, mask=there, other=0)
    size = length + tl.load(entry + 5, mask=there, other=0)
    from_row = from_ptr + batch * from_batch + from_head * from_head_stride + from_token * from_token_stride
    to_row = to_ptr + batch * to_batch + to_head * to_head_stride + to_token * to_token_stride
    width = tl.arange(0, TILE_D).to(tl.int64)  # times strides of any size, as tokens are
    for first in range(0, tl.max(size, 0), TOKENS):
        token = first + (row % TOKENS).to(tl.int64)
        copied = (token < length)[:, None] & (width[None, :] < WIDTH)
        written = (token < size)[:, None] & (width[None, :] < WIDTH)
        values = tl.load(
            from_row[:, None] + token[:, None] * from_token_stride + width[None, :] * from_width,
            mask=copied,
            other=0.0,
        )
        places = to_row[:, None] + token[:, None] * to_token_stride + width[None, :] * to_width
        if ADD:
            values += tl.load(places, mask=copied, other=0.0)
        tl.store(places, values, mask=written)


def triton_copy_segments(
    source: torch.Tensor, destination: torch.Tensor, table: torch.Tensor, mean: float, add: bool = False
) -> None:
    """The contract of `dbsp_kernels.packing.segment_copy.copy_segments`, given the fields of its `CopySegments`."""
    count, width = len(table), source.shape[-1]
    if count == 0 or source.shape[0] == 0:
        return
    rows = max(1, ELEMENTS // padded(width))
    # Where segments are short (heads with token orders of their own), a program takes many of them at once.
    tokens = min(rows, 1 << (max(1, round(mean)) - 1).bit_length())
    copy_kernel[(-(-count // (rows // tokens)), source.shape[0])](
        source, destination, table, count, *source.stride(), *destination.stride(),
        WIDTH=width, TOKENS=tokens, ROWS=rows, TILE_D=padded(width), ADD=add, num_warps=4,
    )  # fmt: skip
