"""Scores of pooled queries and keys, and the choice among them, as Triton kernels: no sort, and one pass over rows."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dbsp_kernels.triton.launch import launch

__all__ = ["pooled_scores_triton", "score_kernel", "select_blocks_triton"]

TILE = 32  # query and key blocks a program scores
WARPS = 8  # of them: 4 have too few registers
UNIT = 2.0**-60  # int64 holds the sum of a row's chances, which is 1


@triton.jit
def _in_units(  # type: ignore[no-untyped-def]
    rows_ptr, first, count, WIDTH: tl.constexpr, PADDED: tl.constexpr, TILE: tl.constexpr,
    SCALE_EXPONENT: tl.constexpr, LEAST_EXPONENT: tl.constexpr, UNIT_EXPONENT: tl.constexpr,
):  # fmt: skip
    """Rows from `first` on, of which there are `count`, as whole numbers of three limbs, and the unit of each.

    Returns:
        int8[TILE, PADDED], limbs of 8 bits, the lowest one first; float64[TILE].
    """
    row, width = first + tl.arange(0, TILE), tl.arange(0, PADDED)
    there = (row < count)[:, None] & (width < WIDTH)[None, :]
    x = tl.load(rows_ptr + row[:, None] * (WIDTH + 1) + width[None, :], mask=there, other=0.0)
    exponent = tl.maximum(tl.max(tl.abs(x), 1).to(tl.int32, bitcast=True) >> 23, LEAST_EXPONENT)
    x = x * ((SCALE_EXPONENT - exponent) << 23).to(tl.float32, bitcast=True)[:, None]
    whole = ((x + 12582912.0) - 12582912.0).to(
        tl.int32
    )  # 1.5 · 2^23: to the nearest whole number, ties to the even one
    low = ((whole + 128) & 255) - 128
    whole = (whole - low) >> 8
    middle = ((whole + 128) & 255) - 128
    high = (whole - middle) >> 8
    unit = ((exponent.to(tl.int64) + UNIT_EXPONENT) << 52).to(tl.float64, bitcast=True)
    return low.to(tl.int8), middle.to(tl.int8), high.to(tl.int8), unit


@triton.jit(do_not_specialize=("nq", "nk"))
def score_kernel(  # type: ignore[no-untyped-def]
    rows_ptr, scores_ptr, nq, nk, scale: tl.float64, similarity: tl.float64,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, TILE: tl.constexpr,
    SCALE_EXPONENT: tl.constexpr, LEAST_EXPONENT: tl.constexpr, UNIT_EXPONENT: tl.constexpr,
):  # fmt: skip
    """One program, a tile of one head. Products of limbs are exact in int32, and their sum in int64."""
    q_first, k_first = tl.program_id(0) * TILE, tl.program_id(1) * TILE
    head = tl.program_id(2).to(tl.int64)
    q_rows = rows_ptr + head * (nq + nk) * (WIDTH + 1)
    k_rows = q_rows + nq * (WIDTH + 1)
    # 1. Rows of queries and keys in whole numbers.
    q0, q1, q2, q_unit = _in_units(
        q_rows, q_first, nq, WIDTH, PADDED, TILE, SCALE_EXPONENT, LEAST_EXPONENT, UNIT_EXPONENT
    )
    k0, k1, k2, k_unit = _in_units(
        k_rows, k_first, nk, WIDTH, PADDED, TILE, SCALE_EXPONENT, LEAST_EXPONENT, UNIT_EXPONENT
    )
    # 2. All products of limbs, those of one weight together.
    k0, k1, k2 = tl.trans(k0), tl.trans(k1), tl.trans(k2)
    total = tl.dot(q2, k2, out_dtype=tl.int32).to(tl.int64)
    total = (total << 8) + tl.dot(q1, k2, tl.dot(q2, k1, out_dtype=tl.int32), out_dtype=tl.int32)
    second = tl.dot(q1, k1, tl.dot(q2, k0, out_dtype=tl.int32), out_dtype=tl.int32)
    total = (total << 8) + tl.dot(q0, k2, second, out_dtype=tl.int32)
    total = (total << 8) + tl.dot(q0, k1, tl.dot(q1, k0, out_dtype=tl.int32), out_dtype=tl.int32)
    total = (total << 8) + tl.dot(q0, k0, out_dtype=tl.int32)
    # 3. Scores.
    scores = total.to(tl.float64) * (q_unit * scale)[:, None] * k_unit[None, :]
    q, k = q_first + tl.arange(0, TILE), k_first + tl.arange(0, TILE)
    vague = tl.load(k_rows + k * (WIDTH + 1) + WIDTH, mask=k < nk, other=0.0).to(tl.float64) <= similarity
    scores = tl.where(vague[None, :], float("-inf"), scores)
    out = scores_ptr + (head * nq + q[:, None]) * nk + k[None, :]
    tl.store(out, scores, mask=(q < nq)[:, None] & (k < nk)[None, :])


def pooled_scores_triton(
    rows: torch.Tensor,
    nq: int,
    scale: float,
    similarity: float,
    scale_exponent: int,
    least_exponent: int,
    unit_exponent: int,
) -> torch.Tensor:
    """The contract of `dbsp_kernels.prediction.block_selection.pooled_scores`, with its exponents."""
    heads, blocks, width = rows.shape
    rows, nk = rows.contiguous(), blocks - nq
    scores = rows.new_empty(heads, nq, nk, dtype=torch.float64)
    if scores.numel():
        grid = (triton.cdiv(nq, TILE), triton.cdiv(nk, TILE), heads)
        rounded = torch.tensor(similarity, dtype=torch.float32, device="cpu").item()  # as torch compares with float32
        launch(
            score_kernel, grid,
            rows, scores, nq, nk, scale, rounded,
            WIDTH=width - 1, PADDED=max(32, triton.next_power_of_2(width - 1)), TILE=TILE,
            SCALE_EXPONENT=scale_exponent, LEAST_EXPONENT=least_exponent, UNIT_EXPONENT=unit_exponent,
            num_warps=WARPS, enable_fp_fusion=False,
        )  # fmt: skip
    return scores


@triton.jit(do_not_specialize=("nq", "nk", "limit"))
def _select_kernel(  # type: ignore[no-untyped-def]
    chance_ptr, dense_ptr, packed_ptr, nq, nk, limit: tl.int64, COUNTED: tl.constexpr, NK: tl.constexpr,
    PER_UNIT: tl.constexpr, CROSSING: tl.constexpr,
):  # fmt: skip
    """One program, one row. Of numbers that are not negative, the larger one has the larger bits."""
    row = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    column = tl.arange(0, NK)
    there = column < nk
    chance = tl.load(chance_ptr + (head * nq + row) * nk + column, mask=there, other=0.0)
    chance = tl.where(chance == chance, chance, 0.0)
    bits = tl.where(there, chance.to(tl.int64, bitcast=True), -1)
    units = tl.where(there, 1, 0).to(tl.int64) if COUNTED else (chance * PER_UNIT).to(tl.int64)
    # 1. The lowest threshold above which all fit within the limit, bit by bit of the highest one that is too low.
    too_low = tl.full([], -1, tl.int64)
    if tl.sum(tl.where(bits >= 0, units, 0), 0) > limit:
        too_low = tl.full([], 0, tl.int64)
        for place in range(62):
            trial = too_low | (tl.full([], 1, tl.int64) << (61 - place))
            too_low = tl.where(tl.sum(tl.where(bits >= trial, units, 0), 0) > limit, trial, too_low)
    above = bits > too_low
    # 2. Of those at the threshold, the first ones that still fit; of the largest, the first one in any case.
    equal = (bits == too_low) & there
    left = limit - tl.sum(tl.where(above, units, 0), 0)
    fitting = left // tl.maximum(tl.max(tl.where(equal, units, 0), 0), 1)
    if CROSSING:
        fitting += 1
    fitting = tl.where(tl.max(bits, 0) == too_low, tl.maximum(fitting, 1), fitting)
    chosen = above | (equal & (tl.cumsum(equal.to(tl.int64), 0) <= fitting))
    # 3. With what is dense in any case, eight to a byte.
    whole = tl.load(dense_ptr + head * (nq + nk) + row) != 0
    chosen = chosen | (tl.load(dense_ptr + head * (nq + nk) + nq + column, mask=there, other=0) != 0) | whole
    shifted = tl.where(chosen & there, 1, 0) << (column % 8)
    packed = tl.sum(tl.reshape(shifted, [NK // 8, 8]), 1)
    byte, row_bytes = tl.arange(0, NK // 8), (nk + 7) // 8
    tl.store(packed_ptr + (head * nq + row) * row_bytes + byte, packed.to(tl.uint8), mask=byte < row_bytes)


def select_blocks_triton(
    chance: torch.Tensor, dense: torch.Tensor, cdf: float | None, count: int, crossing: bool = False
) -> torch.Tensor:
    """The contract of `dbsp_kernels.prediction.block_selection.select_blocks`."""
    heads, nq, nk = chance.shape
    chance, dense = chance.contiguous(), dense.contiguous()  # it may be one for all heads, expanded
    packed = dense.new_empty(heads, nq, -(-nk // 8), dtype=torch.uint8)
    if packed.numel():
        padded = max(16, triton.next_power_of_2(nk))
        launch(
            _select_kernel, (nq, heads),
            chance, dense, packed, nq, nk, count if cdf is None else int(cdf / UNIT), COUNTED=cdf is None, NK=padded,
            PER_UNIT=1 / UNIT, CROSSING=crossing and cdf is not None, num_warps=4 if padded <= 2048 else 8,
        )  # fmt: skip
    return packed
