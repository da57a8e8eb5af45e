"""The Triton kernel: flash attention forward over packed rows, for NVIDIA GPUs and Triton's interpreter."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

__all__ = ["forward_kernel", "triton_attention"]

LOG2_E = 1 / math.log(2)
MAX_TILE = 128  # queries per program, and keys per step, in 16 bits: more does not fit registers and shared memory


@triton.jit
def forward_kernel(  # type: ignore[no-untyped-def]
    q_ptr, k_ptr, v_ptr, index_ptr, count_ptr, length_ptr, order_ptr, out_ptr, lse_ptr,
    q_row, q_token, k_block, k_token, v_block, v_token, index_width, scale_log2,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, WIDTH: tl.constexpr,
    TILE_Q: tl.constexpr, TILE_K: tl.constexpr, TILE_D: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """One program, up to TILE_Q queries of one row: online softmax in base 2 over the row's KV blocks.

    q, out: [rows, BLOCK_Q, WIDTH]; k, v: [blocks, BLOCK_K, WIDTH]; the last dimension is contiguous. TILE_K keys at a
    time. order lists the rows, heaviest first. UPCAST computes in fp32 where the interpreter cannot do bf16.
    """
    row = tl.load(order_ptr + tl.program_id(0)).to(tl.int64)
    queries = tl.program_id(1) * TILE_Q + tl.arange(0, TILE_Q)
    width = tl.arange(0, TILE_D)
    in_q = (queries[:, None] < BLOCK_Q) & (width[None, :] < WIDTH)
    q = tl.load(q_ptr + row * q_row + queries[:, None] * q_token + width[None, :], mask=in_q, other=0.0)
    if UPCAST:
        q = q.to(tl.float32)
    top = tl.full([TILE_Q], float("-inf"), tl.float32)
    total = tl.zeros([TILE_Q], tl.float32)
    acc = tl.zeros([TILE_Q, TILE_D], tl.float32)
    count = tl.load(count_ptr + row)
    for entry in range(count):
        block = tl.load(index_ptr + row * index_width + entry).to(tl.int64)
        length = tl.load(length_ptr + block)
        for start in range(0, length, TILE_K):  # every step has at least one real key, so `top` becomes finite
            keys = start + tl.arange(0, TILE_K)
            real = keys < length
            in_k = real[:, None] & (width[None, :] < WIDTH)
            k = tl.load(k_ptr + block * k_block + keys[:, None] * k_token + width[None, :], mask=in_k, other=0.0)
            v = tl.load(v_ptr + block * v_block + keys[:, None] * v_token + width[None, :], mask=in_k, other=0.0)
            if UPCAST:
                k = k.to(tl.float32)
                v = v.to(tl.float32)
            scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2
            scores = tl.where(real[None, :], scores, float("-inf"))
            new_top = tl.maximum(top, tl.max(scores, 1))
            decay = tl.exp2(top - new_top)
            weights = tl.exp2(scores - new_top[:, None])
            total = total * decay + tl.sum(weights, 1)
            acc = acc * decay[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
            top = new_top
    empty = total == 0.0  # a row without blocks: out 0, lse −inf
    acc = acc / tl.where(empty, 1.0, total)[:, None]
    lse = tl.where(empty, float("-inf"), (top + tl.log2(tl.where(empty, 1.0, total))) * 0.6931471805599453)
    out_at = out_ptr + row * BLOCK_Q * WIDTH + queries[:, None] * WIDTH + width[None, :]
    tl.store(out_at, acc.to(out_ptr.dtype.element_ty), mask=in_q)
    tl.store(lse_ptr + row * BLOCK_Q + queries, lse, mask=queries < BLOCK_Q)


def triton_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    kv_index: torch.Tensor,
    kv_count: torch.Tensor,
    kv_len: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The contract of `dbsp_kernels.block_attention`."""
    q, k, v = (t if t.stride(-1) == 1 else t.contiguous() for t in (q, k, v))
    rows, block_q, width = q.shape
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    lse = torch.empty(rows, block_q, device=q.device, dtype=torch.float32)
    if rows == 0:
        return out, lse
    # Heavy rows first: a long row that starts last would leave the rest of the chip waiting for it.
    order = torch.argsort(kv_count, descending=True).to(torch.int32)
    tile_q, tile_k = _tiles(block_q, k.shape[1], q.dtype)
    forward_kernel[(rows, triton.cdiv(block_q, tile_q))](
        q, k, v, kv_index.contiguous(), kv_count, kv_len, order, out, lse,
        q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        kv_index.shape[1], scale * LOG2_E,
        BLOCK_Q=block_q, BLOCK_K=k.shape[1], WIDTH=width,
        TILE_Q=tile_q,
        TILE_K=tile_k,
        TILE_D=max(16, triton.next_power_of_2(width)),
        UPCAST=q.dtype == torch.bfloat16 and not q.is_cuda,
        num_warps=8 if tile_q >= 128 else 4,
    )  # fmt: skip
    return out, lse


def _tiles(block_q: int, block_k: int, dtype: torch.dtype) -> tuple[int, int]:
    """Queries per program and keys per step: the next powers of two that any GPU since sm80 can hold."""
    most_q, most_k = (64, 16) if dtype == torch.float32 else (MAX_TILE, MAX_TILE)
    return (
        min(most_q, max(16, triton.next_power_of_2(block_q))),
        min(most_k, max(16, triton.next_power_of_2(block_k))),
    )
