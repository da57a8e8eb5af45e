"""Rounding to int8 in Triton, half to even."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dbsp_kernels.triton.launch import launch
from dbsp_kernels.triton.tiles import padded

ROUND = tl.constexpr(1.5 * 2.0**23)  # adding and subtracting it rounds half to even
LEAST = tl.constexpr(2.0**-50)  # keeps products of two scales normal (GPUs may flush subnormals to zero)
ELEMENTS = 8192  # of a block per step, in 32 bits


@triton.jit
def largest_magnitudes(values):  # type: ignore[no-untyped-def]
    """Returns each row's largest magnitude, infinity if any value is not finite."""
    magnitude = tl.abs(values)
    return tl.max(tl.where(magnitude < float("inf"), magnitude, float("inf")), 1)  # False for NaN


@triton.jit
def scales_of(largest, LEAST: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns scales largest / 127 from the rows' largest magnitudes.

    A scale is 1 if largest < LEAST, which rounds the row to zeros, and NaN if largest is not finite.
    """
    scale = tl.div_rn(largest, tl.full(largest.shape, 127.0, tl.float32))
    return tl.where(largest < LEAST, 1.0, tl.where(largest < float("inf"), scale, float("nan")))


@triton.jit
def quantise(values, scale):  # type: ignore[no-untyped-def]
    """Rounds fp32 rows to int8 by the rows' scales; zeros if the scale is NaN."""
    fine = scale < float("inf")
    numbers = tl.div_rn(tl.where(fine[:, None], values, 0.0), tl.where(fine, scale, 1.0)[:, None])
    return ((numbers + ROUND) - ROUND).to(tl.int8)


@triton.jit
def signs(dims):  # type: ignore[no-untyped-def]
    """Computes `dbsp_kernels.exchange.signs` of channels int32[n]."""
    odd = dims & (dims >> 1) & 0x5555
    odd ^= odd >> 8
    odd ^= odd >> 4
    odd ^= odd >> 2
    return (1 - 2 * (odd & 1)).to(tl.float32)


@triton.jit
def butterflies(values, STAGES: tl.constexpr):  # type: ignore[no-untyped-def]
    """Computes `dbsp_kernels.exchange.butterflies` of fp32 rows, operation by operation."""
    ROWS: tl.constexpr = values.shape[0]
    DIMS: tl.constexpr = values.shape[1]
    for stage in tl.static_range(STAGES):
        pairs = tl.reshape(values, [ROWS, DIMS // (2 << stage), 2, 1 << stage])
        # The other value of each pair, exact in integers; compiles to nothing or a shuffle between threads.
        bits = pairs.to(tl.int32, bitcast=True)
        other = (tl.sum(bits, 2, keep_dims=True) - bits).to(tl.float32, bitcast=True)
        is_second = tl.arange(0, 2)[None, None, :, None] == 1
        values = tl.reshape(other + tl.where(is_second, -pairs, pairs), [ROWS, DIMS])
    return values


@triton.jit(do_not_specialize=("length_ptr",))
def quantise_blocks_kernel(  # type: ignore[no-untyped-def]
    from_ptr, length_ptr, to_ptr, scale_ptr, from_block, from_token,
    BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr, TILE: tl.constexpr, TILE_D: tl.constexpr,
):  # fmt: skip
    """Rounds one block per program, read twice: for its scale, then for its values."""
    block = tl.program_id(0).to(tl.int64)
    length = tl.load(length_ptr + block)
    dims = tl.arange(0, TILE_D)
    largest = tl.zeros([TILE], tl.float32)
    for start in range(0, BLOCK, TILE):
        token = start + tl.arange(0, TILE)
        at = from_ptr + block * from_block + token[:, None] * from_token + dims[None, :]
        values = tl.load(at, mask=(token < length)[:, None] & (dims[None, :] < HEAD_DIM), other=0.0)
        largest = tl.maximum(largest, largest_magnitudes(values.to(tl.float32)))
    scale = scales_of(tl.max(largest, 0, keep_dims=True), LEAST)
    tl.store(scale_ptr + block, tl.max(scale, 0))
    for start in range(0, BLOCK, TILE):
        token = start + tl.arange(0, TILE)
        inside = (token < BLOCK)[:, None] & (dims[None, :] < HEAD_DIM)
        at = from_ptr + block * from_block + token[:, None] * from_token + dims[None, :]
        values = tl.load(at, mask=(token < length)[:, None] & (dims[None, :] < HEAD_DIM), other=0.0)
        numbers = quantise(values.to(tl.float32), scale)
        tl.store(to_ptr + (block * BLOCK + token[:, None]) * HEAD_DIM + dims[None, :], numbers, mask=inside)


def quantise_blocks(k: torch.Tensor, kv_len: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rounds blocks of keys [Ck, Bk, D] to int8[Ck, Bk, D] with one scale per block, float32[Ck].

    Tokens beyond a block's length kv_len int32[Ck] are zeros. Blocks with a value that is not finite get scale NaN.
    """
    k = k if k.stride(-1) == 1 else k.contiguous()
    blocks, block, head_dim = k.shape
    numbers = torch.empty(k.shape, dtype=torch.int8, device=k.device)
    scale = torch.empty(blocks, dtype=torch.float32, device=k.device)
    if blocks:
        tile_d = padded(head_dim)
        launch(
            quantise_blocks_kernel, (blocks,),
            k, kv_len, numbers, scale, k.stride(0), k.stride(1),
            BLOCK=block, HEAD_DIM=head_dim, TILE=min(padded(block), max(1, ELEMENTS // tile_d)), TILE_D=tile_d,
            num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return numbers, scale
