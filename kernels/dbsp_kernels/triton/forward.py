"""The Triton kernel: flash attention forward over packed rows, for NVIDIA GPUs and Triton's interpreter."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from dbsp_kernels.inputs import KernelInputs, PartialAttention
from dbsp_kernels.triton.int8 import LEAST, largest_magnitudes, quantise, quantise_blocks, scales_of
from dbsp_kernels.triton.launch import capability_of, launch
from dbsp_kernels.triton.merge import triton_merge_parts
from dbsp_kernels.triton.tiles import HOPPER, Tiles, int8_tiles_for, padded, tiles_for

LOG2_E = 1 / math.log(2)
LEAST_INT8_WIDTH = 32  # reduction width of tensor cores for int8


@triton.jit
def _keys_tile(  # type: ignore[no-untyped-def]
    source, block, start, block_stride, token_stride, real, FIRST: tl.constexpr,
    BLOCK_K: tl.constexpr, HEAD_DIM: tl.constexpr, TILE_K: tl.constexpr, TILE_D: tl.constexpr,
    USE_TMA: tl.constexpr, MASKED: tl.constexpr, INTERPRET_FP32: tl.constexpr,
):  # fmt: skip
    """Loads [TILE_K, TILE_D] of `block` from token `start`, column FIRST; 0 beyond HEAD_DIM, if MASKED at padding."""
    if USE_TMA:  # also zero beyond the block, where the descriptor's second dimension ends
        tile = tl.reshape(source.load([block.to(tl.int32), start, FIRST]), [TILE_K, TILE_D])
        if MASKED:
            tile = tl.where(real[:, None], tile, 0.0)
    else:
        keys = start + tl.arange(0, TILE_K)
        dims = FIRST + tl.arange(0, TILE_D)
        at = source + block * block_stride + keys[:, None] * token_stride + dims[None, :]
        if MASKED:
            tile = tl.load(at, mask=real[:, None] & (dims[None, :] < HEAD_DIM), other=0.0)
        elif FIRST + TILE_D > HEAD_DIM:
            tile = tl.load(at, mask=dims[None, :] < HEAD_DIM, other=0.0)
        else:
            tile = tl.load(at)
    if INTERPRET_FP32:
        tile = tile.to(tl.float32)
    return tile


@triton.jit
def _online_softmax(scores, top, total, scale_log2):  # type: ignore[no-untyped-def]
    """Computes one base-2 online softmax step of scores · scale_log2 (per row).

    Returns the weights, the decay of earlier sums, and the new top and total.
    """
    new_top = tl.maximum(top, tl.max(scores, 1) * scale_log2)
    weights = tl.exp2(scores * scale_log2[:, None] - new_top[:, None])
    decay = tl.exp2(top - new_top)
    return weights, decay, new_top, total * decay + tl.sum(weights, 1)


@triton.jit
def _scores(q, k, block, scale_ptr, scale_log2):  # type: ignore[no-untyped-def]
    """Returns q·kᵀ in fp32 and the factor of each row, which for int8 keys includes the block's scale."""
    scores = tl.dot(q, tl.trans(k), input_precision="ieee")
    if scale_ptr is not None:
        scores, scale_log2 = scores.to(tl.float32), scale_log2 * tl.load(scale_ptr + block)
    return scores, scale_log2


@triton.jit
def _attend(  # type: ignore[no-untyped-def]
    q, k_source, v_source, top, total, acc, second, indices, length_ptr, scale_ptr, first, last, scale_log2,
    k_block, k_token, v_block, v_token,
    BLOCK_K: tl.constexpr, HEAD_DIM: tl.constexpr, TILE_K: tl.constexpr, TILE_D: tl.constexpr, HALVES: tl.constexpr,
    USE_TMA: tl.constexpr, MASKED: tl.constexpr, INTERPRET_FP32: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Computes the online softmax over entries first … last − 1 of a row, all full blocks unless MASKED.

    RAGGED blocks are not a multiple of TILE_K: the last step of each, full or not, masks keys by constants.

    The loop is flat and reads each step's index in that step, so that Triton's pipeliner keeps index, tile and product
    in flight. An index carried over from the previous step would tie each tile's copy to its use.

    With HALVES the output is two tiles of half of D, acc and second; otherwise second is unused. The compiler lays the
    warps of a product along rows only if its result is at most as wide as the scores: each warp then has its rows'
    weights in registers instead of reading them from shared memory.
    """
    STEPS: tl.constexpr = (BLOCK_K + TILE_K - 1) // TILE_K
    RAGGED: tl.constexpr = BLOCK_K % TILE_K != 0
    OUT_D: tl.constexpr = acc.shape[1]
    for step in tl.range(first * STEPS, last * STEPS, num_stages=STAGES):
        start = step % STEPS * TILE_K
        block = tl.load(indices + step // STEPS).to(tl.int64)
        inside = start + tl.arange(0, TILE_K) < BLOCK_K
        real = inside
        if MASKED:
            real = start + tl.arange(0, TILE_K) < tl.load(length_ptr + block)
        # Scores of padding keys are masked even if NaN, but padding values must be zero: 0 · NaN is NaN.
        k = _keys_tile(
            k_source, block, start, k_block, k_token, inside, 0,
            BLOCK_K, HEAD_DIM, TILE_K, TILE_D, USE_TMA, RAGGED and not USE_TMA, INTERPRET_FP32 and scale_ptr is None,
        )  # fmt: skip
        v = _keys_tile(
            v_source, block, start, v_block, v_token, real, 0,
            BLOCK_K, HEAD_DIM, TILE_K, OUT_D, USE_TMA, MASKED or (RAGGED and not USE_TMA), INTERPRET_FP32,
        )  # fmt: skip
        scores, step_scale = _scores(q, k, block, scale_ptr, scale_log2)
        if MASKED or RAGGED:
            scores = tl.where(real[None, :], scores, float("-inf"))
        # The first step of a block has a real key, so top is finite from the first step on.
        weights, decay, top, total = _online_softmax(scores, top, total, step_scale)
        weights = weights.to(v.dtype)
        acc = tl.dot(weights, v, acc * decay[:, None], input_precision="ieee")
        if HALVES:
            other = _keys_tile(
                v_source, block, start, v_block, v_token, real, OUT_D,
                BLOCK_K, HEAD_DIM, TILE_K, OUT_D, USE_TMA, MASKED or (RAGGED and not USE_TMA), INTERPRET_FP32,
            )  # fmt: skip
            second = tl.dot(weights, other, second * decay[:, None], input_precision="ieee")
    return top, total, acc, second


@triton.jit
def _attend_late(  # type: ignore[no-untyped-def]
    q, k_source, v_source, top, total, acc, indices, scale_ptr, full, scale_log2,
    k_block, k_token, v_block, v_token,
    BLOCK_K: tl.constexpr, HEAD_DIM: tl.constexpr, TILE_K: tl.constexpr, TILE_D: tl.constexpr,
    USE_TMA: tl.constexpr, INTERPRET_FP32: tl.constexpr, STAGES: tl.constexpr, SCALE_FIRST: tl.constexpr,
):  # fmt: skip
    """Computes the online softmax over the first `full` entries (full blocks), with outputs one step late.

    The tensor cores compute a step's scores and the previous step's output back to back, and exponentials overlap with
    that output (intra-warpgroup overlap of FlashAttention-3, arXiv 2407.08608, section 3.2). Weights are carried in
    fp32: casting them first would need their registers twice.

    SCALE_FIRST: scale the output before the step's first product instead of between the two.
    """
    STEPS: tl.constexpr = (BLOCK_K + TILE_K - 1) // TILE_K
    RAGGED: tl.constexpr = BLOCK_K % TILE_K != 0
    key = tl.arange(0, TILE_K)
    weights = tl.zeros([acc.shape[0], TILE_K], tl.float32)
    decay = tl.full([acc.shape[0]], 1.0, tl.float32)
    for step in tl.range(0, full * STEPS, num_stages=STAGES):
        start = step % STEPS * TILE_K
        block = tl.load(indices + step // STEPS).to(tl.int64)
        before = tl.maximum(step - 1, 0)
        v_start = before % STEPS * TILE_K
        v_at = tl.load(indices + before // STEPS).to(tl.int64)
        k = _keys_tile(
            k_source, block, start, k_block, k_token, start + key < BLOCK_K, 0,
            BLOCK_K, HEAD_DIM, TILE_K, TILE_D, USE_TMA, RAGGED and not USE_TMA, INTERPRET_FP32 and scale_ptr is None,
        )  # fmt: skip
        v = _keys_tile(
            v_source, v_at, v_start, v_block, v_token, v_start + key < BLOCK_K, 0,
            BLOCK_K, HEAD_DIM, TILE_K, TILE_D, USE_TMA, RAGGED and not USE_TMA, INTERPRET_FP32,
        )  # fmt: skip
        if SCALE_FIRST:
            acc = acc * decay[:, None]
        scores, step_scale = _scores(q, k, block, scale_ptr, scale_log2)
        if RAGGED:
            scores = tl.where((start + key < BLOCK_K)[None, :], scores, float("-inf"))
        acc = tl.dot(weights.to(v.dtype), v, acc if SCALE_FIRST else acc * decay[:, None], input_precision="ieee")
        weights, decay, top, total = _online_softmax(scores, top, total, step_scale)
    if full > 0:
        end = full * STEPS - 1
        v_at, v_start = tl.load(indices + end // STEPS).to(tl.int64), end % STEPS * TILE_K
        v = _keys_tile(
            v_source, v_at, v_start, v_block, v_token, v_start + key < BLOCK_K, 0,
            BLOCK_K, HEAD_DIM, TILE_K, TILE_D, USE_TMA, RAGGED and not USE_TMA, INTERPRET_FP32,
        )  # fmt: skip
        acc = tl.dot(weights.to(v.dtype), v, acc * decay[:, None], input_precision="ieee")
    return top, total, acc


@triton.jit(
    do_not_specialize=(
        "index_ptr",
        "count_ptr",
        "full_ptr",
        "length_ptr",
        "order_ptr",
        "lse_ptr",
        "running_lse_ptr",
        "index_width",
        "part_lse_ptr",
    )
)
def forward_kernel(  # type: ignore[no-untyped-def]
    q_ptr, k_source, v_source, index_ptr, count_ptr, full_ptr, length_ptr, order_ptr,
    out_ptr, lse_ptr, running_ptr, running_lse_ptr, scale_ptr,
    q_row, q_token, k_block, k_token, v_block, v_token, index_width, scale_log2, part_ptr, part_lse_ptr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, HEAD_DIM: tl.constexpr,
    TILE_Q: tl.constexpr, TILE_K: tl.constexpr, TILE_D: tl.constexpr,
    USE_TMA: tl.constexpr, FULL_FIRST: tl.constexpr, SHORT_ONLY: tl.constexpr, RUNNING: tl.constexpr,
    INTERPRET_FP32: tl.constexpr, STAGES: tl.constexpr, LOOP: tl.constexpr,
):  # fmt: skip
    """Computes up to TILE_Q queries of one row per program.

    Args:
        q, out, running: [rows, BLOCK_Q, HEAD_DIM].
        k, v: [blocks, BLOCK_K, HEAD_DIM], last dimension contiguous: pointers, or tensor descriptors with USE_TMA.
        scale: [blocks], scales of int8 keys; queries are then rounded to int8, too. None: k has v's dtype.
        order: [rows]; with `part`, the items of `RowParts`.
        part, part_lse: fp32 [places, BLOCK_Q, HEAD_DIM] and [places, BLOCK_Q], results of parts; None: whole rows.
        LOOP: See `Tiles.loop`.
        FULL_FIRST: The first full[row] entries are full blocks.
        SHORT_ONLY: Skips those entries.
        RUNNING: Merges the result with running and running_lse, which may be out and lse.
        INTERPRET_FP32: Computes in fp32 where the interpreter does not support bf16.
    """
    PARTS: tl.constexpr = part_ptr is not None
    at = tl.program_id(0) * 5 if PARTS else tl.program_id(0)
    row = tl.load(order_ptr + at).to(tl.int64)
    start = 0
    if PARTS:
        if row < 0:  # unused item
            return
        start = tl.load(order_ptr + at + 1)
    queries = tl.program_id(1) * TILE_Q + tl.arange(0, TILE_Q)
    dims = tl.arange(0, TILE_D)
    in_q = (queries[:, None] < BLOCK_Q) & (dims[None, :] < HEAD_DIM)
    q = tl.load(q_ptr + row * q_row + queries[:, None] * q_token + dims[None, :], mask=in_q, other=0.0)
    if INTERPRET_FP32:
        q = q.to(tl.float32)
    scale_log2 = tl.full([TILE_Q], scale_log2, tl.float32)
    if scale_ptr is not None:
        q = q.to(tl.float32)
        of_query = scales_of(largest_magnitudes(q), LEAST)
        q = quantise(q, of_query)
        scale_log2 *= of_query
    top = tl.full([TILE_Q], float("-inf"), tl.float32)
    total = tl.zeros([TILE_Q], tl.float32)
    HALVES: tl.constexpr = LOOP == "halves"
    LATE: tl.constexpr = LOOP == "late" or LOOP == "scale_first"
    acc = tl.zeros([TILE_Q, TILE_D // 2 if HALVES else TILE_D], tl.float32)
    second = tl.zeros([TILE_Q, TILE_D // 2 if HALVES else 1], tl.float32)
    indices = index_ptr + row * index_width + start
    count = tl.load(order_ptr + at + 2 if PARTS else count_ptr + row)
    full = 0
    if FULL_FIRST or SHORT_ONLY:
        full = tl.load(order_ptr + at + 3 if PARTS else full_ptr + row)
    if FULL_FIRST and not LATE:
        top, total, acc, second = _attend(
            q, k_source, v_source, top, total, acc, second, indices, length_ptr, scale_ptr, 0, full, scale_log2,
            k_block, k_token, v_block, v_token, BLOCK_K, HEAD_DIM, TILE_K, TILE_D, HALVES,
            USE_TMA, False, INTERPRET_FP32, STAGES,
        )  # fmt: skip
    top, total, acc, second = _attend(
        q, k_source, v_source, top, total, acc, second, indices, length_ptr, scale_ptr, full, count, scale_log2,
        k_block, k_token, v_block, v_token, BLOCK_K, HEAD_DIM, TILE_K, TILE_D, HALVES,
        USE_TMA, True, INTERPRET_FP32, 1 if FULL_FIRST or SHORT_ONLY else STAGES,
    )  # fmt: skip
    if FULL_FIRST and LATE:  # after the other loop, which would otherwise run with its values in registers
        top, total, acc = _attend_late(
            q, k_source, v_source, top, total, acc, indices, scale_ptr, full, scale_log2,
            k_block, k_token, v_block, v_token, BLOCK_K, HEAD_DIM, TILE_K, TILE_D, USE_TMA, INTERPRET_FP32, STAGES,
            LOOP == "scale_first",
        )  # fmt: skip
    empty = total == 0.0  # a row without blocks: out 0, lse −inf
    lse = tl.where(empty, float("-inf"), top + tl.log2(tl.where(empty, 1.0, total)))
    share, other_share = 1.0 / tl.where(empty, 1.0, total), tl.zeros([TILE_Q], tl.float32)
    HALF: tl.constexpr = TILE_D // 2
    if PARTS:
        place = tl.load(order_ptr + at + 4).to(tl.int64)
        if place >= 0:  # `merge_parts_kernel` merges parts and `running`
            slots = place * BLOCK_Q + queries
            _store_merged(part_ptr, part_ptr, acc, share, other_share, slots, queries, 0, BLOCK_Q, HEAD_DIM, False)
            if HALVES:
                _store_merged(
                    part_ptr, part_ptr, second, share, other_share, slots, queries, HALF, BLOCK_Q, HEAD_DIM, False
                )
            tl.store(part_lse_ptr + slots, lse * 0.6931471805599453, mask=queries < BLOCK_Q)
            return
    slots = row * BLOCK_Q + queries
    if RUNNING:
        other_lse = tl.load(running_lse_ptr + slots, mask=queries < BLOCK_Q, other=0.0) * 1.4426950408889634
        both = tl.maximum(lse, other_lse)
        both = tl.where(both == float("-inf"), 0.0, both)
        weight, other_weight = tl.exp2(lse - both), tl.exp2(other_lse - both)
        sum_of_weights = weight + other_weight
        lse = both + tl.log2(sum_of_weights)
        sum_of_weights = tl.where(sum_of_weights == 0.0, 1.0, sum_of_weights)
        share, other_share = share * (weight / sum_of_weights), other_weight / sum_of_weights
    _store_merged(out_ptr, running_ptr, acc, share, other_share, slots, queries, 0, BLOCK_Q, HEAD_DIM, RUNNING)
    if HALVES:
        _store_merged(
            out_ptr, running_ptr, second, share, other_share, slots, queries, HALF, BLOCK_Q, HEAD_DIM, RUNNING
        )
    tl.store(lse_ptr + slots, lse * 0.6931471805599453, mask=queries < BLOCK_Q)


@triton.jit
def _store_merged(  # type: ignore[no-untyped-def]
    out_ptr, running_ptr, acc, share, other_share, slots, queries, FIRST: tl.constexpr,
    BLOCK_Q: tl.constexpr, HEAD_DIM: tl.constexpr, RUNNING: tl.constexpr,
):  # fmt: skip
    """Writes share · acc, plus other_share · running if RUNNING, to `out` from column FIRST on."""
    dims = FIRST + tl.arange(0, acc.shape[1])
    at = slots[:, None] * HEAD_DIM + dims[None, :]
    inside = (queries[:, None] < BLOCK_Q) & (dims[None, :] < HEAD_DIM)
    acc = acc * share[:, None]
    if RUNNING:
        acc += tl.load(running_ptr + at, mask=inside, other=0.0).to(tl.float32) * other_share[:, None]
    tl.store(out_ptr + at, acc.to(out_ptr.dtype.element_ty), mask=inside)


def triton_attention(
    inputs: KernelInputs,
    tiles: Tiles | None = None,
    use_tma: bool | None = None,
    short_only: bool = False,
    key_scale: torch.Tensor | None = None,
) -> PartialAttention:
    """Computes `dbsp_kernels.block_attention`; tiles and use_tma override the device's defaults.

    `short_only` skips the first kv_full entries of each row; key_scale float32[Ck] are the scales of int8 blocks of k.
    """
    q, scale = inputs.positively_scaled()
    q, k, v = (t if t.stride(-1) == 1 else t.contiguous() for t in (q, inputs.k, inputs.v))
    partial, kv_count, kv_full = inputs.partial, inputs.kv_count, inputs.kv_full
    rows, block_q, head_dim = q.shape
    block_k = k.shape[1]
    out, lse = _destination(q, partial, inputs.out_dtype)
    if rows == 0:
        return out, lse
    interpreted = not q.is_cuda
    capability = HOPPER if interpreted else capability_of(q.device)
    choose_tiles = tiles_for if key_scale is None else int8_tiles_for
    tiles = tiles or choose_tiles(block_q, block_k, head_dim, q.dtype, capability)
    if use_tma is None:
        use_tma = capability >= HOPPER and q.itemsize == 2 and not interpreted
    use_tma = use_tma and _copyable(k) and _copyable(v)
    tile_d, loop = padded(head_dim), tiles.loop
    if key_scale is not None:
        tile_d = max(tile_d, LEAST_INT8_WIDTH)
    v_columns = tile_d // 2 if loop == "halves" else tile_d
    k_source = _described(k, tiles.keys, tile_d) if use_tma else k
    v_source = _described(v, tiles.keys, v_columns) if use_tma else v
    schedule, parts, part = inputs.row_schedule, inputs.parts, None
    if parts is not None:
        schedule = parts.items
        part = lse.new_empty(parts.places, block_q, head_dim), lse.new_empty(parts.places, block_q)
    elif schedule is None:
        schedule = torch.arange(rows, dtype=torch.int32, device=q.device)
    other, other_lse = partial or (out, lse)
    launch(
        forward_kernel, (schedule.shape[0], -(-block_q // tiles.queries)),
        q, k_source, v_source,
        inputs.kv_index.contiguous(), kv_count, kv_count if kv_full is None else kv_full, inputs.kv_len,
        schedule.contiguous(),
        out, lse, other, other_lse, key_scale,
        q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        inputs.kv_index.shape[1], scale * LOG2_E, *(part or (None, None)),
        BLOCK_Q=block_q, BLOCK_K=block_k, HEAD_DIM=head_dim, TILE_Q=tiles.queries, TILE_K=tiles.keys, TILE_D=tile_d,
        USE_TMA=use_tma, FULL_FIRST=not short_only and kv_full is not None,
        SHORT_ONLY=short_only,
        RUNNING=partial is not None, INTERPRET_FP32=q.dtype == torch.bfloat16 and interpreted,
        STAGES=tiles.stages, LOOP=loop, num_warps=tiles.warps, enable_fp_fusion=True,
    )  # fmt: skip
    if parts is not None and part is not None:
        triton_merge_parts(out, lse, *part, parts.cuts, partial)
    return out, lse


def triton_int8_attention(
    inputs: KernelInputs, tiles: Tiles | None = None, use_tma: bool | None = None
) -> PartialAttention:
    """Computes `dbsp_kernels.block_attention` with q·kᵀ in int8: one scale per query, one per block of keys.

    Softmax and values are computed as in `triton_attention`. (After SageAttention, arXiv 2410.02367.)
    """
    k, key_scale = quantise_blocks(inputs.k, inputs.kv_len)
    return triton_attention(replace(inputs, k=k), tiles, use_tma, key_scale=key_scale)


def _destination(q: torch.Tensor, partial: PartialAttention | None, out_dtype: torch.dtype | None) -> PartialAttention:
    """Returns tensors for the result: those of `partial` unless `out_dtype` differs."""
    dtype = out_dtype or (partial[0].dtype if partial else q.dtype)
    lse = partial[1] if partial else torch.empty(q.shape[:2], device=q.device, dtype=torch.float32)
    if partial and partial[0].dtype == dtype:
        return partial[0], lse
    return torch.empty(q.shape, device=q.device, dtype=dtype), lse


def _copyable(t: torch.Tensor) -> bool:
    """Returns True if Hopper's copy engine (TMA) can fetch tiles of blocks [C, B, D]."""
    (block, token, _), size = t.stride(), t.itemsize
    return t.numel() > 0 and t.data_ptr() % 16 == block * size % 16 == token * size % 16 == 0


def _described(t: torch.Tensor, tile: int, columns: int) -> TensorDescriptor:
    return TensorDescriptor(t, list(t.shape), list(t.stride()), [1, tile, columns])
