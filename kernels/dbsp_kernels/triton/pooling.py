"""`sum_tokens` in one pass over the tokens: they are read once, and only sums are written. Then their means."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from dbsp_kernels.triton.launch import launch

__all__ = ["pool_rows_triton", "sum_constants", "sum_kernel", "sum_tokens_triton"]

TILE = 16  # tokens at a time: of 32, some compilers spill


@triton.jit
def _halving_sum(terms, ROWS: tl.constexpr, WIDTH: tl.constexpr, LOG2: tl.constexpr):  # type: ignore[no-untyped-def]
    """`dbsp_kernels.prediction.pooling.halving_sum` of ROWS rows; WIDTH is 2 to the LOG2.

    Halves are split and added: from a sum over an axis of two, Triton 3.9 makes code that lives in local memory. To
    gather the sums from where they are ends the layout that halving led to: else Triton lays out the tokens, which are
    divided by them, in the same way, in which most threads of a warp hold the same ones.
    """
    for level in tl.static_range(LOG2):
        halves = tl.reshape(terms, [ROWS, 2, WIDTH >> (level + 1)])
        first, second = tl.split(tl.permute(halves, (0, 2, 1)))
        terms = first + second
    return tl.gather(tl.reshape(terms, [ROWS]), tl.arange(0, ROWS), 0)


@triton.jit(do_not_specialize=("place_ptr", "first_ptr", "heads", "blocks"))
def sum_kernel(  # type: ignore[no-untyped-def]
    tokens_ptr, place_ptr, first_ptr, sums_ptr,
    batch_stride, head_stride, token_stride, width_stride, heads, blocks,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, TILE: tl.constexpr, LOG2: tl.constexpr,
    LIMIT: tl.constexpr, PER_MEAN_UNIT: tl.constexpr, PER_DIRECTION_UNIT: tl.constexpr,
):  # fmt: skip
    """One program, one block of one head of one batch item."""
    block = tl.program_id(0)
    item = tl.program_id(1)
    base = tokens_ptr + (item // heads).to(tl.int64) * batch_stride + (item % heads).to(tl.int64) * head_stride
    width = tl.arange(0, PADDED).to(tl.int64)
    values = tl.zeros([PADDED], tl.int64)
    directions = tl.zeros([PADDED], tl.int64)
    end = tl.load(first_ptr + block + 1)
    for start in range(tl.load(first_ptr + block), end, TILE):
        entry = start + tl.arange(0, TILE)
        place = tl.load(place_ptr + entry, mask=entry < end, other=0)
        at = base + place[:, None] * token_stride + width[None, :] * width_stride
        x = tl.load(at, mask=(entry < end)[:, None] & (width < WIDTH)[None, :], other=0.0).to(tl.float32)
        x = tl.where(x == x, x, 0.0)
        x = tl.minimum(tl.maximum(x, -LIMIT), LIMIT)
        length = tl.sqrt_rn(_halving_sum(x * x, TILE, PADDED, LOG2))[:, None]  # before sums: else sm120 spills
        values += tl.sum(tl.floor(x * PER_MEAN_UNIT).to(tl.int64), 0)
        x = tl.where(length > 0, tl.div_rn(x, tl.where(length > 0, length, 1.0)), 0.0)
        directions += tl.sum(tl.floor(x * PER_DIRECTION_UNIT).to(tl.int32), 0)
    row = (item % heads).to(tl.int64) * (tl.num_programs(1) // heads) + item // heads  # head after head
    out = sums_ptr + (row * blocks + block) * (2 * WIDTH + 2)
    tl.store(out + width, values, mask=width < WIDTH)
    tl.store(out + WIDTH + width, directions, mask=width < WIDTH)
    tl.store(out + 2 * WIDTH + tl.arange(0, 2), tl.zeros([2], tl.int64))


def sum_constants(width: int, limit: float, mean_unit: float, direction_unit: float) -> dict[str, Any]:
    """What `sum_kernel` is compiled for."""
    padded = triton.next_power_of_2(width)
    return {
        "WIDTH": width, "PADDED": padded, "TILE": TILE, "LOG2": padded.bit_length() - 1,
        "LIMIT": limit, "PER_MEAN_UNIT": 1 / mean_unit, "PER_DIRECTION_UNIT": 1 / direction_unit,
    }  # fmt: skip


def sum_tokens_triton(
    tokens: torch.Tensor,
    place: torch.Tensor,
    first: torch.Tensor,
    limit: float,
    mean_unit: float,
    direction_unit: float,
) -> torch.Tensor:
    """The contract of `dbsp_kernels.prediction.pooling.sum_tokens`, with its limit and units."""
    batch, heads, _, width = tokens.shape
    blocks = len(first) - 1
    sums = tokens.new_empty(heads, batch, blocks, 2 * width + 2, dtype=torch.int64)
    if sums.numel() == 0:
        return sums
    launch(
        sum_kernel, (blocks, batch * heads),
        tokens, place, first, sums, *tokens.stride(), heads, blocks,
        **sum_constants(width, limit, mean_unit, direction_unit),
        enable_fp_fusion=False,  # a fused multiply and add would round otherwise than the CPU
    )  # fmt: skip
    return sums


@triton.jit(do_not_specialize=("length_ptr", "copy_stride", "blocks"))
def _pool_kernel(  # type: ignore[no-untyped-def]
    sums_ptr, length_ptr, pooled_ptr, copy_stride, block_stride, blocks,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, LOG2: tl.constexpr,
    MEAN_UNIT: tl.constexpr, DIRECTION_UNIT: tl.constexpr,
):  # fmt: skip
    """One program, one block of one head of one batch item."""
    block = tl.program_id(0).to(tl.int64)
    copy = tl.program_id(1).to(tl.int64)
    width = tl.arange(0, PADDED)
    start = sums_ptr + copy * copy_stride + block * block_stride + width
    length = tl.load(length_ptr + block).to(tl.float64)
    mean = tl.load(start, mask=width < WIDTH, other=0).to(tl.float64) * MEAN_UNIT / length
    direction = tl.load(start + WIDTH, mask=width < WIDTH, other=0).to(tl.float64) * DIRECTION_UNIT / length
    square = _halving_sum(tl.reshape(direction * direction, [1, PADDED]), 1, PADDED, LOG2)
    out = pooled_ptr + (copy * blocks + block) * (WIDTH + 1)
    tl.store(out + width, mean.to(tl.float32), mask=width < WIDTH)
    tl.store(out + WIDTH + tl.arange(0, 1), square.to(tl.float32))


def pool_rows_triton(
    sums: torch.Tensor, lengths: torch.Tensor, mean_unit: float, direction_unit: float
) -> torch.Tensor:
    """The contract of `dbsp_kernels.prediction.pooling.pool_rows`, with its units."""
    heads, batch, blocks, width = *sums.shape[:3], sums.shape[3] // 2 - 1
    pooled = sums.new_empty(heads, batch, blocks, width + 1, dtype=torch.float32)
    if pooled.numel():
        padded = triton.next_power_of_2(width)
        launch(
            _pool_kernel, (blocks, heads * batch),
            sums, lengths, pooled, sums.stride(1), sums.stride(2), blocks,
            WIDTH=width, PADDED=padded, LOG2=padded.bit_length() - 1,
            MEAN_UNIT=mean_unit, DIRECTION_UNIT=direction_unit,
            enable_fp_fusion=False,  # a fused multiply and add would round otherwise than the CPU
        )  # fmt: skip
    return pooled
