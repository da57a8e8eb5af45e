"""The Triton kernel: flash attention forward over packed rows, for NVIDIA GPUs and Triton's interpreter."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from dbsp_kernels.inputs import KernelInputs
from dbsp_kernels.merge import PartialAttention
from dbsp_kernels.triton.tile_config import HOPPER, Tiles, padded, tiles_for

__all__ = ["capability_of", "forward_kernel", "triton_attention"]

LOG2_E = 1 / math.log(2)


@triton.jit
def _keys_tile(  # type: ignore[no-untyped-def]
    source, block, start, block_stride, token_stride, real,
    BLOCK_K: tl.constexpr, WIDTH: tl.constexpr, TILE_K: tl.constexpr, TILE_D: tl.constexpr,
    USE_TMA: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """[TILE_K, TILE_D] of keys or values: tokens `start` and following of `block`; zero beyond WIDTH, and, where
    MASKED, at tokens that are not real."""
    if USE_TMA:
        tile = source.load([(block * BLOCK_K + start).to(tl.int32), 0])
        if MASKED:
            tile = tl.where(real[:, None], tile, 0.0)
    else:
        keys = start + tl.arange(0, TILE_K)
        width = tl.arange(0, TILE_D)
        at = source + block * block_stride + keys[:, None] * token_stride + width[None, :]
        if MASKED:
            tile = tl.load(at, mask=real[:, None] & (width[None, :] < WIDTH), other=0.0)
        elif TILE_D != WIDTH:
            tile = tl.load(at, mask=width[None, :] < WIDTH, other=0.0)
        else:
            tile = tl.load(at)
    return tile


@triton.jit
def _attend(  # type: ignore[no-untyped-def]
    q, k_source, v_source, top, total, acc, indices, length_ptr, first, last, scale_log2,
    k_block, k_token, v_block, v_token,
    BLOCK_K: tl.constexpr, WIDTH: tl.constexpr, TILE_K: tl.constexpr, TILE_D: tl.constexpr,
    USE_TMA: tl.constexpr, MASKED: tl.constexpr, INTERPRET_FP32: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Online softmax in base 2 over entries first … last − 1 of a row; unless MASKED all of them are full blocks.

    One flat loop that reads each step's index in that step: so Triton's pipeliner sees index → tile → product and
    keeps all three in flight. An index carried over from the step before would tie each tile's copy to its own use.
    """
    STEPS: tl.constexpr = (BLOCK_K + TILE_K - 1) // TILE_K
    for step in tl.range(first * STEPS, last * STEPS, num_stages=STAGES):
        start = step % STEPS * TILE_K
        block = tl.load(indices + step // STEPS).to(tl.int64)
        inside = start + tl.arange(0, TILE_K) < BLOCK_K
        real = inside
        if MASKED:
            real = start + tl.arange(0, TILE_K) < tl.load(length_ptr + block)
        # Scores of keys that are not real are masked, whatever they are; but a NaN in a value survives a weight of 0.
        k = _keys_tile(
            k_source, block, start, k_block, k_token, inside,
            BLOCK_K, WIDTH, TILE_K, TILE_D, USE_TMA, BLOCK_K % TILE_K != 0 and not USE_TMA,
        )  # fmt: skip
        v = _keys_tile(
            v_source, block, start, v_block, v_token, real,
            BLOCK_K, WIDTH, TILE_K, TILE_D, USE_TMA, MASKED,
        )  # fmt: skip
        if INTERPRET_FP32:
            k = k.to(tl.float32)
            v = v.to(tl.float32)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        if MASKED:
            scores = tl.where(real[None, :], scores, float("-inf"))
        # The first step of a block has a real key, so new_top is finite from the first step on.
        new_top = tl.maximum(top, tl.max(scores, 1) * scale_log2)
        weights = tl.exp2(scores * scale_log2 - new_top[:, None])
        decay = tl.exp2(top - new_top)
        total = total * decay + tl.sum(weights, 1)
        acc = tl.dot(weights.to(v.dtype), v, acc * decay[:, None], input_precision="ieee")
        top = new_top
    return top, total, acc


@triton.jit
def forward_kernel(  # type: ignore[no-untyped-def]
    q_ptr, k_source, v_source, index_ptr, count_ptr, full_ptr, length_ptr, order_ptr,
    out_ptr, lse_ptr, running_ptr, running_lse_ptr,
    q_row, q_token, k_block, k_token, v_block, v_token, index_width, scale_log2,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, WIDTH: tl.constexpr,
    TILE_Q: tl.constexpr, TILE_K: tl.constexpr, TILE_D: tl.constexpr,
    USE_TMA: tl.constexpr, FULL_FIRST: tl.constexpr, SHORT_ONLY: tl.constexpr, RUNNING: tl.constexpr,
    INTERPRET_FP32: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One program, up to TILE_Q queries of one row; see `triton_attention` for the arguments.

    Args:
        q, out, running: [rows, BLOCK_Q, WIDTH].
        k, v: [blocks, BLOCK_K, WIDTH], the last dimension contiguous: pointers, or with USE_TMA tensor descriptors
            over [blocks · BLOCK_K, WIDTH].
        FULL_FIRST: The first full[row] entries are full blocks, and BLOCK_K is a multiple of TILE_K.
        SHORT_ONLY: Those entries are left out.
        RUNNING: The result is merged with running and running_lse, which may be out and lse themselves.
        INTERPRET_FP32: Computes in fp32 where the interpreter cannot do bf16.
    """
    row = tl.load(order_ptr + tl.program_id(0)).to(tl.int64)
    queries = tl.program_id(1) * TILE_Q + tl.arange(0, TILE_Q)
    width = tl.arange(0, TILE_D)
    in_q = (queries[:, None] < BLOCK_Q) & (width[None, :] < WIDTH)
    q = tl.load(q_ptr + row * q_row + queries[:, None] * q_token + width[None, :], mask=in_q, other=0.0)
    if INTERPRET_FP32:
        q = q.to(tl.float32)
    top = tl.full([TILE_Q], float("-inf"), tl.float32)
    total = tl.zeros([TILE_Q], tl.float32)
    acc = tl.zeros([TILE_Q, TILE_D], tl.float32)
    indices = index_ptr + row * index_width
    count = tl.load(count_ptr + row)
    full = 0
    if FULL_FIRST or SHORT_ONLY:
        full = tl.load(full_ptr + row)
    if FULL_FIRST:
        top, total, acc = _attend(
            q, k_source, v_source, top, total, acc, indices, length_ptr, 0, full, scale_log2,
            k_block, k_token, v_block, v_token, BLOCK_K, WIDTH, TILE_K, TILE_D, USE_TMA, False, INTERPRET_FP32, STAGES,
        )  # fmt: skip
    top, total, acc = _attend(
        q, k_source, v_source, top, total, acc, indices, length_ptr, full, count, scale_log2,
        k_block, k_token, v_block, v_token, BLOCK_K, WIDTH, TILE_K, TILE_D, USE_TMA, True, INTERPRET_FP32,
        1 if FULL_FIRST or SHORT_ONLY else STAGES,
    )  # fmt: skip
    empty = total == 0.0  # a row without blocks: out 0, lse −inf
    lse = tl.where(empty, float("-inf"), top + tl.log2(tl.where(empty, 1.0, total)))
    acc = acc / tl.where(empty, 1.0, total)[:, None]
    places = row * BLOCK_Q + queries
    out_at = places[:, None] * WIDTH + width[None, :]
    if RUNNING:
        other_lse = tl.load(running_lse_ptr + places, mask=queries < BLOCK_Q, other=0.0) * 1.4426950408889634
        other = tl.load(running_ptr + out_at, mask=in_q, other=0.0).to(tl.float32)
        both = tl.maximum(lse, other_lse)
        both = tl.where(both == float("-inf"), 0.0, both)
        share, other_share = tl.exp2(lse - both), tl.exp2(other_lse - both)
        sum_of_shares = share + other_share
        lse = both + tl.log2(sum_of_shares)
        sum_of_shares = tl.where(sum_of_shares == 0.0, 1.0, sum_of_shares)
        acc = acc * (share / sum_of_shares)[:, None] + other * (other_share / sum_of_shares)[:, None]
    tl.store(out_ptr + out_at, acc.to(out_ptr.dtype.element_ty), mask=in_q)
    tl.store(lse_ptr + places, lse * 0.6931471805599453, mask=queries < BLOCK_Q)


def triton_attention(
    inputs: KernelInputs, tiles: Tiles | None = None, use_tma: bool | None = None, short_only: bool = False
) -> PartialAttention:
    """The contract of `dbsp_kernels.block_attention`; tiles and use_tma override what is best for the device.

    Args:
        short_only: Only the entries from kv_full on, which must be given; the others have been computed elsewhere.
    """
    q, scale = inputs.positively_scaled()
    q, k, v = (t if t.stride(-1) == 1 else t.contiguous() for t in (q, inputs.k, inputs.v))
    partial, kv_count, kv_full = inputs.partial, inputs.kv_count, inputs.kv_full
    rows, block_q, width = q.shape
    block_k = k.shape[1]
    out, lse = _destination(q, partial, inputs.out_dtype)
    if rows == 0:
        return out, lse
    interpreted = not q.is_cuda
    capability = HOPPER if interpreted else capability_of(q.device)
    tiles = tiles or tiles_for(block_q, block_k, width, q.dtype, capability)
    if use_tma is None:
        use_tma = capability >= HOPPER and q.itemsize == 2 and not interpreted
    use_tma = use_tma and _copyable(k) and _copyable(v)
    tile_d = padded(width)
    k_source, v_source = (_described(t, tiles.keys, tile_d) if use_tma else t for t in (k, v))
    schedule = inputs.row_schedule
    if schedule is None:
        schedule = torch.arange(rows, dtype=torch.int32, device=q.device)
    other, other_lse = partial or (out, lse)
    forward_kernel[(rows, -(-block_q // tiles.queries))](
        q, k_source, v_source,
        inputs.kv_index.contiguous(), kv_count, kv_count if kv_full is None else kv_full, inputs.kv_len,
        schedule.contiguous(),
        out, lse, other, other_lse,
        q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        inputs.kv_index.shape[1], scale * LOG2_E,
        BLOCK_Q=block_q, BLOCK_K=block_k, WIDTH=width, TILE_Q=tiles.queries, TILE_K=tiles.keys, TILE_D=tile_d,
        USE_TMA=use_tma, FULL_FIRST=not short_only and kv_full is not None and block_k % tiles.keys == 0,
        SHORT_ONLY=short_only,
        RUNNING=partial is not None, INTERPRET_FP32=q.dtype == torch.bfloat16 and interpreted,
        STAGES=tiles.stages, num_warps=tiles.warps, enable_fp_fusion=True,
    )  # fmt: skip
    return out, lse


def _destination(q: torch.Tensor, partial: PartialAttention | None, out_dtype: torch.dtype | None) -> PartialAttention:
    """Returns the tensors for the result: those of the partial one, unless another dtype is required."""
    dtype = out_dtype or (partial[0].dtype if partial else q.dtype)
    lse = partial[1] if partial else torch.empty(q.shape[:2], device=q.device, dtype=torch.float32)
    if partial and partial[0].dtype == dtype:
        return partial[0], lse
    return torch.empty(q.shape, device=q.device, dtype=dtype), lse


def capability_of(device: torch.device) -> int:
    """Returns the compute capability as one number: 90 for Hopper."""
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def _copyable(t: torch.Tensor) -> bool:
    """Returns whether Hopper's copy engine can fetch tiles of blocks [C, B, D] as one matrix [C·B, D]."""
    one_matrix = t.stride(0) == t.shape[1] * t.stride(1)
    return one_matrix and t.numel() > 0 and t.data_ptr() % 16 == 0 and t.stride(1) * t.itemsize % 16 == 0


def _described(t: torch.Tensor, tile: int, tile_d: int) -> TensorDescriptor:
    blocks, size, width = t.shape
    return TensorDescriptor(t, [blocks * size, width], [t.stride(1), 1], [tile, tile_d])
