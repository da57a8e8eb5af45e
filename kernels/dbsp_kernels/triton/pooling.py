"""`sum_tokens` in one pass over the tokens: they are read once, and only the blocks' sums are written."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

__all__ = ["sum_tokens_triton"]

TILE = 32  # tokens at a time


@triton.jit
def _sum_kernel(  # type: ignore[no-untyped-def]
    tokens_ptr, place_ptr, first_ptr, values_ptr, directions_ptr,
    batch_stride, head_stride, token_stride, width_stride, heads, blocks,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, TILE: tl.constexpr, LOG2: tl.constexpr,
    LIMIT: tl.constexpr, PER_MEAN_UNIT: tl.constexpr, PER_DIRECTION_UNIT: tl.constexpr,
):  # fmt: skip
    """One program, one block of one head of one batch item."""
    block = tl.program_id(0)
    item = tl.program_id(1)
    base = tokens_ptr + (item // heads).to(tl.int64) * batch_stride + (item % heads).to(tl.int64) * head_stride
    width = tl.arange(0, PADDED)
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
        values += tl.sum(tl.floor(x.to(tl.float64) * PER_MEAN_UNIT).to(tl.int64), 0)
        square = x * x
        for level in tl.static_range(LOG2):  # halves are added until one is left, as in `halving_sum`
            square = tl.sum(tl.reshape(square, [TILE, 2, PADDED >> (level + 1)]), 1)
        length = tl.sqrt_rn(tl.reshape(square, [TILE]))[:, None]
        x = tl.where(length > 0, tl.div_rn(x, tl.where(length > 0, length, 1.0)), 0.0)
        directions += tl.sum(tl.floor(x * PER_DIRECTION_UNIT).to(tl.int64), 0)
    out = (item.to(tl.int64) * blocks + block) * WIDTH + width
    tl.store(values_ptr + out, values, mask=width < WIDTH)
    tl.store(directions_ptr + out, directions, mask=width < WIDTH)


def sum_tokens_triton(
    tokens: torch.Tensor,
    place: torch.Tensor,
    first: torch.Tensor,
    limit: float,
    mean_unit: float,
    direction_unit: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The contract of `dbsp_kernels.packing.pooling.sum_tokens`, with its limit and units."""
    batch, heads, _, width = tokens.shape
    blocks = len(first) - 1
    values, directions = tokens.new_empty(2, batch, heads, blocks, width, dtype=torch.int64)
    if values.numel() == 0:
        return values, directions
    padded = triton.next_power_of_2(width)
    _sum_kernel[(blocks, batch * heads)](
        tokens, place, first, values, directions, *tokens.stride(), heads, blocks,
        WIDTH=width, PADDED=padded, TILE=TILE, LOG2=padded.bit_length() - 1,
        LIMIT=limit, PER_MEAN_UNIT=1 / mean_unit, PER_DIRECTION_UNIT=1 / direction_unit,
        enable_fp_fusion=False,  # a fused multiply and add would round otherwise than the CPU
    )  # fmt: skip
    return values, directions
