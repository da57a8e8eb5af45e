"""Triton kernels for block means, scores and selection; `sum_tokens` reads each token once and writes only sums."""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl

from dbsp_kernels import rounding
from dbsp_kernels.triton.launch import launch
from dbsp_kernels.triton.tiles import padded

LIMIT = tl.constexpr(rounding.LIMIT)
MEAN_UNIT = tl.constexpr(rounding.MEAN_UNIT)
DIRECTION_UNIT = tl.constexpr(rounding.DIRECTION_UNIT)
SCALE_EXPONENT = tl.constexpr(rounding.SCALE_EXPONENT)
LEAST_EXPONENT = tl.constexpr(rounding.LEAST_EXPONENT)
UNIT_EXPONENT = tl.constexpr(rounding.UNIT_EXPONENT)

TOKENS_TILE = 16  # tokens at a time; with 32, some compilers spill registers


@triton.jit
def _halving_sum(terms, ROWS: tl.constexpr, WIDTH: tl.constexpr, LOG2: tl.constexpr):  # type: ignore[no-untyped-def]
    """Computes `dbsp_kernels.prediction.halving_sum` of ROWS rows; WIDTH is 2 to the LOG2.

    Halves are split and added, because for a sum over an axis of two Triton 3.9 generates code that spills to local
    memory. The final gather resets the layout: otherwise Triton would lay out the tokens, which are divided by the
    sums, like the halves, with most threads of a warp holding the same tokens.
    """
    for level in tl.static_range(LOG2):
        halves = tl.reshape(terms, [ROWS, 2, WIDTH >> (level + 1)])
        first, second = tl.split(tl.permute(halves, (0, 2, 1)))
        terms = first + second
    return tl.gather(tl.reshape(terms, [ROWS]), tl.arange(0, ROWS), 0)


@triton.jit(do_not_specialize=("position_ptr", "first_ptr", "rows_ptr", "heads", "blocks"))
def sum_kernel(  # type: ignore[no-untyped-def]
    tokens_ptr, position_ptr, first_ptr, rows_ptr, sums_ptr,
    batch_stride, head_stride, token_stride, dim_stride, heads, blocks,
    HEAD_DIM: tl.constexpr, PADDED: tl.constexpr, TILE: tl.constexpr, LOG2: tl.constexpr,
    PER_MEAN_UNIT: tl.constexpr, PER_DIRECTION_UNIT: tl.constexpr,
):  # fmt: skip
    """Sums one block of one head of one batch item per program, into one of the `blocks` rows of sums."""
    block = tl.program_id(0)
    item = tl.program_id(1)
    base = tokens_ptr + (item // heads).to(tl.int64) * batch_stride + (item % heads).to(tl.int64) * head_stride
    dims = tl.arange(0, PADDED).to(tl.int64)
    values = tl.zeros([PADDED], tl.int64)
    directions = tl.zeros([PADDED], tl.int64)
    end = tl.load(first_ptr + block + 1)
    for start in range(tl.load(first_ptr + block), end, TILE):
        entry = start + tl.arange(0, TILE)
        position = tl.load(position_ptr + entry, mask=entry < end, other=0)
        at = base + position[:, None] * token_stride + dims[None, :] * dim_stride
        x = tl.load(at, mask=(entry < end)[:, None] & (dims < HEAD_DIM)[None, :], other=0.0).to(tl.float32)
        x = tl.where(x == x, x, 0.0)
        x = tl.minimum(tl.maximum(x, -LIMIT), LIMIT)
        length = tl.sqrt_rn(_halving_sum(x * x, TILE, PADDED, LOG2))[:, None]  # before the sums, or sm120 spills
        values += tl.sum(tl.floor(x * PER_MEAN_UNIT).to(tl.int64), 0)
        x = tl.where(length > 0, tl.div_rn(x, tl.where(length > 0, length, 1.0)), 0.0)
        directions += tl.sum(tl.floor(x * PER_DIRECTION_UNIT).to(tl.int32), 0)
    row = (item % heads).to(tl.int64) * (tl.num_programs(1) // heads) + item // heads  # head-major
    if rows_ptr is not None:
        block = tl.load(rows_ptr + block)
    out = sums_ptr + (row * blocks + block) * (2 * HEAD_DIM + 2)
    tl.store(out + dims, values, mask=dims < HEAD_DIM)
    tl.store(out + HEAD_DIM + dims, directions, mask=dims < HEAD_DIM)
    tl.store(out + 2 * HEAD_DIM + tl.arange(0, 2), tl.zeros([2], tl.int64))


def sum_tokens_triton(
    tokens: torch.Tensor,
    position: torch.Tensor,
    first: torch.Tensor,
    sums: torch.Tensor | None = None,
    rows: torch.Tensor | None = None,
) -> torch.Tensor:
    """Implements the contract of `dbsp_kernels.prediction.sum_tokens`."""
    batch, heads, _, head_dim = tokens.shape
    blocks = first.shape[0] - 1
    if sums is None:
        sums = tokens.new_empty(heads, batch, blocks, 2 * head_dim + 2, dtype=torch.int64)
    if blocks and sums.numel():
        width = padded(head_dim)
        launch(
            sum_kernel, (blocks, batch * heads),
            tokens, position, first, rows, sums, *tokens.stride(), heads, sums.shape[2],
            HEAD_DIM=head_dim, PADDED=width, TILE=TOKENS_TILE, LOG2=width.bit_length() - 1,
            PER_MEAN_UNIT=1 / rounding.MEAN_UNIT, PER_DIRECTION_UNIT=1 / rounding.DIRECTION_UNIT,
            enable_fp_fusion=False,  # a fused multiply and add would round otherwise than the CPU
        )  # fmt: skip
    return sums


@triton.jit(do_not_specialize=("length_ptr", "copy_stride", "blocks"))
def _pool_kernel(  # type: ignore[no-untyped-def]
    sums_ptr, length_ptr, pooled_ptr, copy_stride, block_stride, blocks,
    HEAD_DIM: tl.constexpr, PADDED: tl.constexpr, LOG2: tl.constexpr,
):  # fmt: skip
    """Pools one block of one head of one batch item per program."""
    block = tl.program_id(0).to(tl.int64)
    copy = tl.program_id(1).to(tl.int64)
    dims = tl.arange(0, PADDED)
    start = sums_ptr + copy * copy_stride + block * block_stride + dims
    length = tl.load(length_ptr + block).to(tl.float64)
    mean = tl.load(start, mask=dims < HEAD_DIM, other=0).to(tl.float64) * MEAN_UNIT / length
    direction = tl.load(start + HEAD_DIM, mask=dims < HEAD_DIM, other=0).to(tl.float64) * DIRECTION_UNIT / length
    square = _halving_sum(tl.reshape(direction * direction, [1, PADDED]), 1, PADDED, LOG2)
    out = pooled_ptr + (copy * blocks + block) * (HEAD_DIM + 1)
    tl.store(out + dims, mean.to(tl.float32), mask=dims < HEAD_DIM)
    tl.store(out + HEAD_DIM + tl.arange(0, 1), square.to(tl.float32))


def pool_rows_triton(sums: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Implements the contract of `dbsp_kernels.prediction.pool_rows`."""
    heads, batch, blocks, head_dim = *sums.shape[:3], sums.shape[3] // 2 - 1
    pooled = sums.new_empty(heads, batch, blocks, head_dim + 1, dtype=torch.float32)
    if pooled.numel():
        width = padded(head_dim)
        launch(
            _pool_kernel, (blocks, heads * batch),
            sums, lengths, pooled, sums.stride(1), sums.stride(2), blocks,
            HEAD_DIM=head_dim, PADDED=width, LOG2=width.bit_length() - 1,
            enable_fp_fusion=False,  # a fused multiply and add would round otherwise than the CPU
        )  # fmt: skip
    return pooled


SCORE_TILE = 32  # query and key blocks per program
WARPS = 8  # 4 have too few registers
ROUND = tl.constexpr(1.5 * 2.0**23)  # adding and subtracting it rounds half to even
UNIT = 2.0**-60  # int64 holds the sum of a row's chances (1)


@triton.jit
def _in_units(  # type: ignore[no-untyped-def]
    rows_ptr, first, count, HEAD_DIM: tl.constexpr, PADDED: tl.constexpr, TILE: tl.constexpr
):
    """Loads rows from `first` on (of `count` in all) as integers of three limbs, and each row's unit.

    Returns:
        int8[TILE, PADDED], limbs of 8 bits, the lowest one first; float64[TILE].
    """
    row, dims = first + tl.arange(0, TILE), tl.arange(0, PADDED)
    there = (row < count)[:, None] & (dims < HEAD_DIM)[None, :]
    x = tl.load(rows_ptr + row[:, None] * (HEAD_DIM + 1) + dims[None, :], mask=there, other=0.0)
    exponent = tl.maximum(tl.max(tl.abs(x), 1).to(tl.int32, bitcast=True) >> 23, LEAST_EXPONENT)
    x = x * ((-exponent + SCALE_EXPONENT) << 23).to(tl.float32, bitcast=True)[:, None]
    whole = ((x + ROUND) - ROUND).to(tl.int32)
    low = ((whole + 128) & 255) - 128
    whole = (whole - low) >> 8
    middle = ((whole + 128) & 255) - 128
    high = (whole - middle) >> 8
    unit = ((exponent.to(tl.int64) + UNIT_EXPONENT) << 52).to(tl.float64, bitcast=True)
    return low.to(tl.int8), middle.to(tl.int8), high.to(tl.int8), unit


@triton.jit(do_not_specialize=("nq", "nk"))
def score_kernel(  # type: ignore[no-untyped-def]
    rows_ptr, scores_ptr, nq, nk, scale: tl.float64, similarity: tl.float64,
    HEAD_DIM: tl.constexpr, PADDED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Computes a tile of one head per program. Products of limbs are exact in int32, their sum in int64."""
    q_first, k_first = tl.program_id(0) * TILE, tl.program_id(1) * TILE
    head = tl.program_id(2).to(tl.int64)
    q_rows = rows_ptr + head * (nq + nk) * (HEAD_DIM + 1)
    k_rows = q_rows + nq * (HEAD_DIM + 1)
    # 1. Queries and keys as integers
    q0, q1, q2, q_unit = _in_units(q_rows, q_first, nq, HEAD_DIM, PADDED, TILE)
    k0, k1, k2, k_unit = _in_units(k_rows, k_first, nk, HEAD_DIM, PADDED, TILE)
    # 2. Products of limbs, grouped by weight
    k0, k1, k2 = tl.trans(k0), tl.trans(k1), tl.trans(k2)
    total = tl.dot(q2, k2, out_dtype=tl.int32).to(tl.int64)
    total = (total << 8) + tl.dot(q1, k2, tl.dot(q2, k1, out_dtype=tl.int32), out_dtype=tl.int32)
    second = tl.dot(q1, k1, tl.dot(q2, k0, out_dtype=tl.int32), out_dtype=tl.int32)
    total = (total << 8) + tl.dot(q0, k2, second, out_dtype=tl.int32)
    total = (total << 8) + tl.dot(q0, k1, tl.dot(q1, k0, out_dtype=tl.int32), out_dtype=tl.int32)
    total = (total << 8) + tl.dot(q0, k0, out_dtype=tl.int32)
    # 3. Scores
    scores = total.to(tl.float64) * (q_unit * scale)[:, None] * k_unit[None, :]
    q, k = q_first + tl.arange(0, TILE), k_first + tl.arange(0, TILE)
    vague = tl.load(k_rows + k * (HEAD_DIM + 1) + HEAD_DIM, mask=k < nk, other=0.0).to(tl.float64) <= similarity
    scores = tl.where(vague[None, :], float("-inf"), scores)
    out = scores_ptr + (head * nq + q[:, None]) * nk + k[None, :]
    tl.store(out, scores, mask=(q < nq)[:, None] & (k < nk)[None, :])


def pooled_scores_triton(rows: torch.Tensor, nq: int, scale: float, similarity: float) -> torch.Tensor:
    """Implements the contract of `dbsp_kernels.prediction.pooled_scores`."""
    heads, blocks, entries = rows.shape
    rows, nk = rows.contiguous(), blocks - nq
    scores = rows.new_empty(heads, nq, nk, dtype=torch.float64)
    if scores.numel():
        grid = (-(-nq // SCORE_TILE), -(-nk // SCORE_TILE), heads)
        rounded = float(np.float32(similarity))  # as torch compares with float32
        launch(
            score_kernel, grid,
            rows, scores, nq, nk, scale, rounded,
            HEAD_DIM=entries - 1, PADDED=max(32, padded(entries - 1)), TILE=SCORE_TILE,
            num_warps=WARPS, enable_fp_fusion=False,
        )  # fmt: skip
    return scores


@triton.jit(do_not_specialize=("nq", "nk", "limit"))
def _select_kernel(  # type: ignore[no-untyped-def]
    chance_ptr, dense_ptr, packed_ptr, nq, nk, limit: tl.int64, COUNTED: tl.constexpr, NK: tl.constexpr,
    PER_UNIT: tl.constexpr, CROSSING: tl.constexpr,
):  # fmt: skip
    """Selects one row's blocks per program. Non-negative floats are ordered like their bits."""
    row = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    column = tl.arange(0, NK)
    there = column < nk
    chance = tl.load(chance_ptr + (head * nq + row) * nk + column, mask=there, other=0.0)
    chance = tl.where(chance == chance, chance, 0.0)
    bits = tl.where(there, chance.to(tl.int64, bitcast=True), -1)
    units = tl.where(there, 1, 0).to(tl.int64) if COUNTED else (chance * PER_UNIT).to(tl.int64)
    # 1. Binary search, bit by bit, for the highest threshold that exceeds the limit
    too_low = tl.full([], -1, tl.int64)
    if tl.sum(tl.where(bits >= 0, units, 0), 0) > limit:
        too_low = tl.full([], 0, tl.int64)
        for position in range(62):
            trial = too_low | (tl.full([], 1, tl.int64) << (61 - position))
            too_low = tl.where(tl.sum(tl.where(bits >= trial, units, 0), 0) > limit, trial, too_low)
    above = bits > too_low
    # 2. At the threshold, the first blocks that still fit; always the first block of largest chance
    equal = (bits == too_low) & there
    left = limit - tl.sum(tl.where(above, units, 0), 0)
    fitting = left // tl.maximum(tl.max(tl.where(equal, units, 0), 0), 1)
    if CROSSING:
        fitting += 1
    fitting = tl.where(tl.max(bits, 0) == too_low, tl.maximum(fitting, 1), fitting)
    chosen = above | (equal & (tl.cumsum(equal.to(tl.int64), 0) <= fitting))
    # 3. Add dense rows and columns, and pack eight blocks per byte
    whole = tl.load(dense_ptr + head * (nq + nk) + row) != 0
    chosen = chosen | (tl.load(dense_ptr + head * (nq + nk) + nq + column, mask=there, other=0) != 0) | whole
    shifted = tl.where(chosen & there, 1, 0) << (column % 8)
    packed = tl.sum(tl.reshape(shifted, [NK // 8, 8]), 1)
    byte, row_bytes = tl.arange(0, NK // 8), (nk + 7) // 8
    tl.store(packed_ptr + (head * nq + row) * row_bytes + byte, packed.to(tl.uint8), mask=byte < row_bytes)


def select_blocks_triton(
    chance: torch.Tensor, dense: torch.Tensor, cdf: float | None, count: int, crossing: bool = False
) -> torch.Tensor:
    """Implements the contract of `dbsp_kernels.prediction.select_blocks`."""
    heads, nq, nk = chance.shape
    chance, dense = chance.contiguous(), dense.contiguous()  # may be expanded over heads
    packed = dense.new_empty(heads, nq, -(-nk // 8), dtype=torch.uint8)
    if packed.numel():
        width = padded(nk)
        launch(
            _select_kernel, (nq, heads),
            chance, dense, packed, nq, nk, count if cdf is None else int(cdf / UNIT), COUNTED=cdf is None, NK=width,
            PER_UNIT=1 / UNIT, CROSSING=crossing and cdf is not None, num_warps=4 if width <= 2048 else 8,
        )  # fmt: skip
    return packed
