"""Triton kernels that copy token segments and quantize them to int8."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from dbsp_kernels import rounding
from dbsp_kernels.rounding import norm_of, stages_of
from dbsp_kernels.segments import CopySegments
from dbsp_kernels.triton.int8 import butterflies, largest_magnitudes, quantise, scales_of, signs
from dbsp_kernels.triton.launch import launch
from dbsp_kernels.triton.tiles import padded


@triton.jit
def _entry(table_ptr, segment, segments):  # type: ignore[no-untyped-def]
    """Loads a segment's columns: positions as int64, length and zeros as int32; 0 beyond the last segment."""
    there = segment < segments
    entry = table_ptr + segment.to(tl.int64) * 6
    from_head = tl.load(entry, mask=there, other=0).to(tl.int64)
    from_token = tl.load(entry + 1, mask=there, other=0).to(tl.int64)
    to_head = tl.load(entry + 2, mask=there, other=0).to(tl.int64)
    to_token = tl.load(entry + 3, mask=there, other=0).to(tl.int64)
    length = tl.load(entry + 4, mask=there, other=0)
    return from_head, from_token, to_head, to_token, length, tl.load(entry + 5, mask=there, other=0)


ELEMENTS = 8192  # per program and step: in 16 bits, 8 loads of 16 bytes in flight for each of 128 threads


@triton.jit(do_not_specialize=range(5, 11))  # tables and their numbers of segments
def copy_kernel(  # type: ignore[no-untyped-def]
    from_ptr, second_from_ptr, third_from_ptr, to_ptr, second_to_ptr, table_ptr, second_table_ptr, third_table_ptr,
    segments, second_segments, third_segments,
    from_batch, from_head_stride, from_token_stride, from_dim_stride,
    to_batch, to_head_stride, to_token_stride, to_dim_stride, second_to_batch, second_to_head_stride,
    SEVERAL: tl.constexpr, BOTH: tl.constexpr, HEAD_DIM: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr,
    TILE_D: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """Copies ROWS tokens at a time: TOKENS of each of ROWS / TOKENS segments of one table, of one batch element.

    There is one table per source (SEVERAL) or per destination (BOTH).
    """
    PROGRAM: tl.constexpr = ROWS // TOKENS
    program = tl.program_id(0)
    batch = tl.program_id(1).to(tl.int64)
    to_heads, to_head_stride = to_ptr + batch * to_batch, tl.cast(to_head_stride, tl.int64)
    if BOTH:  # branch instead of tl.where, which loses the pointer's 16-byte alignment
        of_first = tl.cdiv(segments, PROGRAM)
        if program >= of_first:
            program -= of_first
            table_ptr, segments = second_table_ptr, second_segments
            to_heads = second_to_ptr + batch * second_to_batch
            to_head_stride = tl.cast(second_to_head_stride, tl.int64)
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
    from_head, from_token, to_head, to_token, length, zeros = _entry(table_ptr, segment, segments)
    size = length + zeros
    from_row = from_ptr + batch * from_batch + from_head * from_head_stride + from_token * from_token_stride
    to_row = to_heads + to_head * to_head_stride + to_token * to_token_stride
    dims = tl.arange(0, TILE_D).to(tl.int64)  # int64 for large strides
    for first in range(0, tl.max(size, 0), TOKENS):
        token = first + (row % TOKENS).to(tl.int64)
        copied = (token < length)[:, None] & (dims[None, :] < HEAD_DIM)
        written = (token < size)[:, None] & (dims[None, :] < HEAD_DIM)
        values = tl.load(
            from_row[:, None] + token[:, None] * from_token_stride + dims[None, :] * from_dim_stride,
            mask=copied,
            other=0.0,
        )
        offsets = to_row[:, None] + token[:, None] * to_token_stride + dims[None, :] * to_dim_stride
        if ADD:
            values += tl.load(offsets, mask=copied, other=0.0)
        tl.store(offsets, values, mask=written)


def _tokens_per_segment(mean: float, rows: int) -> int:
    """Returns how many tokens of a segment a program copies at a time, by mean length; `rows` is its capacity.

    A program takes several segments if they are short (heads with different token orders). Rounded to powers of four,
    so that few variants are compiled.
    """
    bits = (max(1, round(mean)) - 1).bit_length()  # log2 of the next power of two
    return min(rows, 1 << bits + bits % 2)


def _strides(t: torch.Tensor) -> tuple[int, ...]:
    """Returns strides (batch, head, token, D) of [B, heads, tokens, D] or of a buffer [tokens, B, D]."""
    if t.ndim == 4:
        return t.stride()
    token, batch, dim = t.stride()
    return batch, 0, token, dim


def triton_copy_segments(
    sources: Sequence[torch.Tensor], destination: torch.Tensor, segments: Sequence[CopySegments], add: bool = False
) -> None:
    """Implements the contract of `dbsp_kernels.exchange.copy_segments` in one launch for sources of equal strides."""
    _copy([(source, destination, of_source) for source, of_source in zip(sources, segments, strict=True)], add=add)


def triton_copy_to_both(
    source: torch.Tensor, destinations: Sequence[torch.Tensor], segments: Sequence[CopySegments]
) -> None:
    """Implements the contract of `dbsp_kernels.exchange.copy_to_both` in one launch for tokens of equal strides."""
    _copy([(source, to, of_destination) for to, of_destination in zip(destinations, segments, strict=True)], both=True)


@functools.lru_cache(maxsize=256)  # equal in every attention of a plan
def _copy_grid(counts: tuple[int, ...], means: tuple[float, ...], head_dim: int) -> tuple[int, int, int, int]:
    """Returns the number of programs, tokens of a segment and of a program at a time, and TILE_D."""
    tile_d = padded(head_dim)
    rows = max(1, ELEMENTS // tile_d)
    mean = sum([count * mean for count, mean in zip(counts, means, strict=True)]) / sum(counts)
    tokens = _tokens_per_segment(mean, rows)
    per_program = rows // tokens
    return sum([-(-count // per_program) for count in counts]), tokens, rows, tile_d


def _copy(
    copies: list[tuple[torch.Tensor, torch.Tensor, CopySegments]], add: bool = False, both: bool = False
) -> None:
    """Copies from up to three sources to one destination, or from one source to `both` destinations.

    Copies with segments share one launch if their strides are equal, otherwise one each.
    """
    copies = [copy for copy in copies if copy[2].count]
    if len(copies) > 1 and len({(source.stride(), _strides(to)[2:]) for source, to, _ in copies}) > 1:
        for copy in copies:
            _copy([copy], add)
        return
    if not copies:
        return
    source, to, _ = copies[0]
    second_to = copies[-1][1]
    batch = source.shape[0] if source.ndim == 4 else source.shape[1]
    if batch == 0:
        return
    head_dim, several = source.shape[-1], len(copies) > 1
    counts, means = (tuple([getattr(segments, name) for _, _, segments in copies]) for name in ("count", "mean"))
    programs, tokens, rows, tile_d = _copy_grid(counts, means, head_dim)
    tables = [segments.table for _, _, segments in copies]
    sources = [source] if both else [source for source, _, _ in copies]
    launch(
        copy_kernel, (programs, batch),
        *[*sources, source, source][:3], to, second_to, *[*tables, tables[0], tables[0]][:3], *[*counts, 0, 0][:3],
        *_strides(source), *_strides(to), *_strides(second_to)[:2],
        SEVERAL=several and not both, BOTH=several and both, HEAD_DIM=head_dim, TOKENS=tokens, ROWS=rows,
        TILE_D=tile_d, ADD=add, num_warps=4,
    )  # fmt: skip


INT8_ELEMENTS = 4096  # per program and step, in 32 bits
TINY = tl.constexpr(rounding.TINY)


@triton.jit(do_not_specialize=("table_ptr", "segments", "to_batch", "to_head_stride", "to_token_stride"))
def quantise_kernel(  # type: ignore[no-untyped-def]
    from_ptr, bytes_ptr, scales_ptr, less_ptr, table_ptr, segments,
    from_batch, from_head_stride, from_token_stride, from_dim_stride, to_batch, to_head_stride, to_token_stride,
    less_batch, less_head,
    HEAD_DIM: tl.constexpr, WORDS: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, TILE_D: tl.constexpr,
    LESS: tl.constexpr, ROTATE: tl.constexpr, STAGES: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """Quantizes ROWS tokens at a time, scheduled like `copy_kernel`; the destination's strides are in words."""
    row = tl.arange(0, ROWS)
    segment = tl.program_id(0) * (ROWS // TOKENS) + row // TOKENS
    batch = tl.program_id(1).to(tl.int64)
    from_head, from_token, to_head, to_token, length, _ = _entry(table_ptr, segment, segments)
    from_row = from_ptr + batch * from_batch + from_head * from_head_stride + from_token * from_token_stride
    to_row = batch * to_batch + to_head * to_head_stride + to_token * to_token_stride
    dims = tl.arange(0, TILE_D).to(tl.int64)
    for first in range(0, tl.max(length, 0), TOKENS):
        token = first + (row % TOKENS).to(tl.int64)
        here = token < length
        copied = here[:, None] & (dims[None, :] < HEAD_DIM)
        values = tl.load(
            from_row[:, None] + token[:, None] * from_token_stride + dims[None, :] * from_dim_stride,
            mask=copied,
            other=0.0,
        ).to(tl.float32)
        if LESS:
            less = less_ptr + batch * less_batch + from_head[:, None] * less_head + dims[None, :]
            values -= tl.load(less, mask=copied, other=0.0)
        if ROTATE:
            values = butterflies(values * signs(tl.arange(0, TILE_D))[None, :], STAGES)
        largest = largest_magnitudes(values)
        scale = scales_of(largest, TINY)
        sent_scale = scale * NORM if ROTATE else scale
        word = to_row + token * to_token_stride
        tl.store(scales_ptr + word + (WORDS - 1), tl.where(largest < TINY, 0.0, sent_scale), mask=here)
        tl.store(
            bytes_ptr + word[:, None] * 4 + dims[None, :],
            quantise(values, scale),
            mask=here[:, None] & (dims[None, :] < 4 * WORDS - 4),
        )


def triton_quantise_segments(
    source: torch.Tensor, destination: torch.Tensor, segments: CopySegments, less: torch.Tensor | None, rotate: bool
) -> None:
    """Implements the contract of `dbsp_kernels.exchange.quantise_segments`."""
    count, head_dim, words = segments.count, source.shape[-1], destination.shape[-1]
    if count == 0 or source.shape[0] == 0:
        return
    rows = max(1, INT8_ELEMENTS // padded(head_dim))
    tokens = _tokens_per_segment(segments.mean, rows)
    less_strides = (0, 0) if less is None else less.stride()[:2]
    launch(
        quantise_kernel, (-(-count // (rows // tokens)), source.shape[0]),
        source, destination.view(torch.int8), destination.view(torch.float32), less, segments.table, count,
        *source.stride(), *destination.stride()[:3], *less_strides,
        HEAD_DIM=head_dim, WORDS=words, TOKENS=tokens, ROWS=rows, TILE_D=padded(max(4 * words - 4, head_dim)),
        LESS=less is not None, ROTATE=rotate, STAGES=stages_of(head_dim), NORM=norm_of(head_dim), num_warps=4,
        enable_fp_fusion=False,
    )  # fmt: skip


@triton.jit(do_not_specialize=("table_ptr", "segments", "from_batch", "from_token_stride"))
def rotate_kernel(  # type: ignore[no-untyped-def]
    from_ptr, scales_ptr, to_ptr, table_ptr, segments,
    from_batch, from_token_stride, to_batch, to_head_stride, to_token_stride, to_dim_stride,
    HEAD_DIM: tl.constexpr, WORDS: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, TILE_D: tl.constexpr,
    STAGES: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """Rotates ROWS tokens back at a time, scheduled like `copy_kernel`; int8 rows if WORDS > 0."""
    row = tl.arange(0, ROWS)
    segment = tl.program_id(0) * (ROWS // TOKENS) + row // TOKENS
    batch = tl.program_id(1).to(tl.int64)
    _, from_token, to_head, to_token, length, zeros = _entry(table_ptr, segment, segments)
    filled = length + zeros
    from_row = batch * from_batch + from_token * from_token_stride
    to_row = to_ptr + batch * to_batch + to_head * to_head_stride + to_token * to_token_stride
    dims = tl.arange(0, TILE_D).to(tl.int64)
    for first in range(0, tl.max(filled, 0), TOKENS):
        token = first + (row % TOKENS).to(tl.int64)
        copied = (token < length)[:, None] & (dims[None, :] < HEAD_DIM)
        start = from_row + token * from_token_stride
        if WORDS > 0:
            scale = tl.load(scales_ptr + start + (WORDS - 1), mask=token < length, other=0.0)
            values = tl.load(from_ptr + start[:, None] * 4 + dims[None, :], mask=copied, other=0)
            values = values.to(tl.float32) * scale[:, None]
        else:
            values = tl.load(from_ptr + start[:, None] + dims[None, :], mask=copied, other=0.0).to(tl.float32)
        values = butterflies(values, STAGES) * (signs(tl.arange(0, TILE_D)) * NORM)[None, :]
        tl.store(
            to_row[:, None] + token[:, None] * to_token_stride + dims[None, :] * to_dim_stride,
            values,
            mask=(token < filled)[:, None] & (dims[None, :] < HEAD_DIM),
        )


def triton_rotate_segments(source: torch.Tensor, destination: torch.Tensor, segments: CopySegments) -> None:
    """Implements the contract of `dbsp_kernels.exchange.rotate_segments`."""
    count, batch, head_dim = segments.count, destination.shape[0], destination.shape[-1]
    if count == 0 or batch == 0:
        return
    rows = max(1, INT8_ELEMENTS // padded(head_dim))
    tokens = _tokens_per_segment(segments.mean, rows)
    is_int8 = source.dtype == torch.int32
    numbers, scales = (source.view(torch.int8), source.view(torch.float32)) if is_int8 else (source, None)
    launch(
        rotate_kernel, (-(-count // (rows // tokens)), batch),
        numbers, scales, destination, segments.table, count,
        source.stride(1), source.stride(0), *destination.stride(),
        HEAD_DIM=head_dim, WORDS=source.shape[-1] if is_int8 else 0, TOKENS=tokens, ROWS=rows,
        TILE_D=padded(head_dim), STAGES=stages_of(head_dim), NORM=norm_of(head_dim), num_warps=4,
        enable_fp_fusion=False,
    )  # fmt: skip
