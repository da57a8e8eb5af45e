"""Copying segments of tokens, as a Triton kernel."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from dbsp_kernels.triton.launch import launch
from dbsp_kernels.triton.tile_config import padded

__all__ = ["copy_kernel", "tokens_per_segment", "triton_copy_segments"]

ELEMENTS = 8192  # per program and step: 8 loads of 16 bytes in flight for each of 128 threads, in 16 bits


@triton.jit(
    do_not_specialize=(
        "table_ptr",
        "second_table_ptr",
        "third_table_ptr",
        "segments",
        "second_segments",
        "third_segments",
    )
)
def copy_kernel(  # type: ignore[no-untyped-def]
    from_ptr, second_from_ptr, third_from_ptr, to_ptr, table_ptr, second_table_ptr, third_table_ptr,
    segments, second_segments, third_segments,
    from_batch, from_head_stride, from_token_stride, from_width, to_batch, to_head_stride, to_token_stride, to_width,
    SEVERAL: tl.constexpr, WIDTH: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, TILE_D: tl.constexpr,
    ADD: tl.constexpr,
):  # fmt: skip
    """ROWS tokens at a time: TOKENS of each of ROWS / TOKENS segments of one source, of one element of the batch."""
    PROGRAM: tl.constexpr = ROWS // TOKENS
    program = tl.program_id(0)
    if SEVERAL:
        of_first, of_second = tl.cdiv(segments, PROGRAM), tl.cdiv(second_segments, PROGRAM)
        if program >= of_first + of_second:
            program -= of_first + of_second
            from_ptr, table_ptr, segments = third_from_ptr, third_table_ptr, third_segments
        elif program >= of_first:
            program -= of_first
            from_ptr, table_ptr, segments = second_from_ptr, second_table_ptr, second_segments
    row = tl.arange(0, ROWS)
    segment = program * PROGRAM + row // TOKENS
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


def tokens_per_segment(mean: float, rows: int) -> int:
    """Returns how many tokens of a segment a program copies at a time, given the mean length and its `rows` tokens.

    If segments are short (heads with different token orders), a program takes several segments. Powers of four, so
    that few variants are compiled.
    """
    tokens = 1
    while tokens < min(rows, round(mean)):
        tokens *= 4
    return min(rows, tokens)


def triton_copy_segments(
    sources: Sequence[torch.Tensor],
    destination: torch.Tensor,
    tables: Sequence[torch.Tensor],
    mean: float,
    add: bool = False,
) -> None:
    """The contract of `dbsp_kernels.packing.segment_copy.copy_segments` and `gather_segments`, in one launch.

    Args:
        sources: One to three, all of the same strides.
        tables, mean: Of their `CopySegments`; the mean over all segments.
    """
    given = [(source, table) for source, table in zip(sources, tables, strict=True) if len(table)]
    if not given or destination.shape[0] == 0:
        return
    counts = [len(table) for _, table in given]
    (first, second, third), copied = zip(*[*given, given[-1], given[-1]][:3], strict=True)
    width = first.shape[-1]
    rows = max(1, ELEMENTS // padded(width))
    tokens = tokens_per_segment(mean, rows)
    programs = sum(-(-count // (rows // tokens)) for count in counts)
    launch(
        copy_kernel, (programs, destination.shape[0]),
        first, second, third, destination, *copied, *[*counts, 0, 0][:3],
        *first.stride(), *destination.stride(),
        SEVERAL=len(given) > 1, WIDTH=width, TOKENS=tokens, ROWS=rows, TILE_D=padded(width), ADD=add, num_warps=4,
    )  # fmt: skip
