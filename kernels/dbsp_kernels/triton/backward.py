"""Triton backward: dQ by rows, dK and dV by blocks with the transposed table. Deterministic, without atomics.

P = exp2(S·log2 e·scale − lse₂) is recomputed from the log-sum-exp of the whole attention, and dS = P ∘ (dO·Vᵀ − δ)
with δ = Σ dO·O (FlashAttention-2, arXiv 2307.08691, Alg. 2).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from dbsp_kernels.inputs import BackwardInputs, Gradients
from dbsp_kernels.triton.forward import LOG2_E
from dbsp_kernels.triton.launch import launch
from dbsp_kernels.triton.tiles import Tiles, backward_tiles_for, padded


@triton.jit
def _tile(  # type: ignore[no-untyped-def]
    pointer, block, start, inside, UPCAST: tl.constexpr,
    BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr, TILE: tl.constexpr, TILE_D: tl.constexpr,
):  # fmt: skip
    """Loads tokens from `start` on of `block` → [TILE, TILE_D]; zero if not `inside` or beyond HEAD_DIM."""
    token, dims = start + tl.arange(0, TILE), tl.arange(0, TILE_D)
    at = pointer + (block * BLOCK + token[:, None]) * HEAD_DIM + dims[None, :]
    tile = tl.load(at, mask=inside[:, None] & (dims[None, :] < HEAD_DIM), other=0.0)
    return tile.to(tl.float32) if UPCAST else tile


@triton.jit(
    do_not_specialize=("lse_ptr", "delta_ptr", "index_ptr", "count_ptr", "length_ptr", "order_ptr", "index_width")
)
def backward_rows_kernel(  # type: ignore[no-untyped-def]
    q_ptr, k_ptr, v_ptr, dout_ptr, lse_ptr, delta_ptr, index_ptr, count_ptr, length_ptr, order_ptr, dq_ptr,
    index_width, scale, scale_log2,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, HEAD_DIM: tl.constexpr,
    TILE_Q: tl.constexpr, TILE_K: tl.constexpr, TILE_D: tl.constexpr, UPCAST: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Computes dQ of up to TILE_Q queries of a row. Contiguous tensors; lse in base 2, +inf if a row has no block."""
    STEPS: tl.constexpr = (BLOCK_K + TILE_K - 1) // TILE_K
    row = tl.load(order_ptr + tl.program_id(0)).to(tl.int64)
    first = tl.program_id(1) * TILE_Q
    query, dims = first + tl.arange(0, TILE_Q), tl.arange(0, TILE_D)
    real = query < BLOCK_Q
    q = _tile(q_ptr, row, first, real, UPCAST, BLOCK_Q, HEAD_DIM, TILE_Q, TILE_D)
    dout = _tile(dout_ptr, row, first, real, UPCAST, BLOCK_Q, HEAD_DIM, TILE_Q, TILE_D)
    lse = tl.load(lse_ptr + row * BLOCK_Q + query, mask=real, other=float("inf"))
    delta = tl.load(delta_ptr + row * BLOCK_Q + query, mask=real, other=0.0)
    dq = tl.zeros([TILE_Q, TILE_D], tl.float32)
    for step in tl.range(0, tl.load(count_ptr + row) * STEPS, num_stages=STAGES):
        block = tl.load(index_ptr + row * index_width + step // STEPS).to(tl.int64)
        start = step % STEPS * TILE_K
        present = start + tl.arange(0, TILE_K) < tl.load(length_ptr + block)
        k = _tile(k_ptr, block, start, present, UPCAST, BLOCK_K, HEAD_DIM, TILE_K, TILE_D)
        v = _tile(v_ptr, block, start, present, UPCAST, BLOCK_K, HEAD_DIM, TILE_K, TILE_D)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        weights = tl.where(present[None, :], tl.exp2(scores * scale_log2 - lse[:, None]), 0.0)
        dscores = weights * (tl.dot(dout, tl.trans(v), input_precision="ieee") - delta[:, None])
        dq = tl.dot(dscores.to(k.dtype), k, dq, input_precision="ieee")
    offsets = (row * BLOCK_Q + query)[:, None] * HEAD_DIM + dims[None, :]
    tl.store(dq_ptr + offsets, dq * scale, mask=real[:, None] & (dims[None, :] < HEAD_DIM))


@triton.jit(
    do_not_specialize=("lse_ptr", "delta_ptr", "rows_ptr", "count_ptr", "length_ptr", "order_ptr", "rows_width")
)
def backward_keys_kernel(  # type: ignore[no-untyped-def]
    q_ptr, k_ptr, v_ptr, dout_ptr, lse_ptr, delta_ptr, rows_ptr, count_ptr, length_ptr, order_ptr, dk_ptr, dv_ptr,
    rows_width, scale, scale_log2,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, HEAD_DIM: tl.constexpr,
    TILE_Q: tl.constexpr, TILE_K: tl.constexpr, TILE_D: tl.constexpr, UPCAST: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Computes dK and dV of up to TILE_K keys of one block, over the rows that attend to it in ascending order."""
    STEPS: tl.constexpr = (BLOCK_Q + TILE_Q - 1) // TILE_Q
    block = tl.load(order_ptr + tl.program_id(0)).to(tl.int64)
    first = tl.program_id(1) * TILE_K
    key, dims = first + tl.arange(0, TILE_K), tl.arange(0, TILE_D)
    present = key < tl.load(length_ptr + block)
    k = _tile(k_ptr, block, first, present, UPCAST, BLOCK_K, HEAD_DIM, TILE_K, TILE_D)
    v = _tile(v_ptr, block, first, present, UPCAST, BLOCK_K, HEAD_DIM, TILE_K, TILE_D)
    dk, dv = tl.zeros([TILE_K, TILE_D], tl.float32), tl.zeros([TILE_K, TILE_D], tl.float32)
    for step in tl.range(0, tl.load(count_ptr + block) * STEPS, num_stages=STAGES):
        row = tl.load(rows_ptr + block * rows_width + step // STEPS).to(tl.int64)
        start = step % STEPS * TILE_Q
        query = start + tl.arange(0, TILE_Q)
        q = _tile(q_ptr, row, start, query < BLOCK_Q, UPCAST, BLOCK_Q, HEAD_DIM, TILE_Q, TILE_D)
        dout = _tile(dout_ptr, row, start, query < BLOCK_Q, UPCAST, BLOCK_Q, HEAD_DIM, TILE_Q, TILE_D)
        lse = tl.load(lse_ptr + row * BLOCK_Q + query, mask=query < BLOCK_Q, other=float("inf"))
        delta = tl.load(delta_ptr + row * BLOCK_Q + query, mask=query < BLOCK_Q, other=0.0)
        scores = tl.dot(k, tl.trans(q), input_precision="ieee")  # [TILE_K, TILE_Q]
        weights = tl.where(present[:, None], tl.exp2(scores * scale_log2 - lse[None, :]), 0.0)
        dv = tl.dot(weights.to(dout.dtype), dout, dv, input_precision="ieee")
        dscores = weights * (tl.dot(v, tl.trans(dout), input_precision="ieee") - delta[None, :])
        dk = tl.dot(dscores.to(q.dtype), q, dk, input_precision="ieee")
    offsets = (block * BLOCK_K + key)[:, None] * HEAD_DIM + dims[None, :]
    kept = (key < BLOCK_K)[:, None] & (dims[None, :] < HEAD_DIM)
    tl.store(dk_ptr + offsets, dk * scale, mask=kept)
    tl.store(dv_ptr + offsets, dv, mask=kept)


def triton_attention_backward(inputs: BackwardInputs) -> Gradients:
    """Implements the contract of `dbsp_kernels.block_attention_backward`."""
    forward = inputs.forward
    q, k, v, dout = (t.contiguous() for t in (forward.q, forward.k, forward.v, inputs.dout))
    dq, dk, dv = (torch.zeros_like(t, dtype=torch.float32) for t in (q, k, v))
    (rows, block_q, head_dim), (blocks, block_k, _) = q.shape, k.shape
    if rows == 0 or blocks == 0:
        return dq, dk, dv
    lse = (inputs.lse * LOG2_E).masked_fill(torch.isneginf(inputs.lse), torch.inf).contiguous()
    delta, (turned, count, key_order) = inputs.delta().contiguous(), inputs.transposed()
    row_order, key_order = (
        torch.arange(number, dtype=torch.int32, device=q.device) if order is None else order
        for order, number in ((forward.row_schedule, rows), (key_order, blocks))
    )
    tile_d = padded(head_dim)
    of_rows, of_keys = backward_tiles_for(block_q, block_k, head_dim, q.dtype)
    sizes = {"BLOCK_Q": block_q, "BLOCK_K": block_k, "HEAD_DIM": head_dim, "TILE_D": tile_d}
    upcast = q.dtype == torch.bfloat16 and not q.is_cuda
    scales = (forward.scale, forward.scale * LOG2_E)
    launch(
        backward_rows_kernel, (rows, -(-block_q // of_rows.queries)),
        q, k, v, dout, lse, delta, forward.kv_index.contiguous(), forward.kv_count, forward.kv_len, row_order, dq,
        forward.kv_index.shape[1], *scales, **sizes, UPCAST=upcast, **_options(of_rows),
    )  # fmt: skip
    launch(
        backward_keys_kernel, (blocks, -(-block_k // of_keys.keys)),
        q, k, v, dout, lse, delta, turned, count, forward.kv_len, key_order, dk, dv,
        turned.shape[1], *scales, **sizes, UPCAST=upcast, **_options(of_keys),
    )  # fmt: skip
    return dq, dk, dv


def _options(tiles: Tiles) -> dict[str, Any]:
    sizes = {"TILE_Q": tiles.queries, "TILE_K": tiles.keys, "STAGES": tiles.stages}
    return sizes | {"num_warps": tiles.warps, "enable_fp_fusion": True}
