"""A plain dense flash-attention forward in Triton, full tiles only: the cycle model compares db-SP's kernels with it.

FlashAttention-2 (arXiv 2307.08691, Alg. 1) as one writes it in Triton: pointers, one loop over tiles of keys, softmax
in base 2. FlashAttention-3's paper (arXiv 2407.08608) times such a kernel beside its own.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

__all__ = ["dense_attention", "dense_kernel"]


@triton.jit
def dense_kernel(  # type: ignore[no-untyped-def]
    q_ptr, k_ptr, v_ptr, out_ptr, tokens, scale_log2,
    TILE_Q: tl.constexpr, TILE_K: tl.constexpr, WIDTH: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One program, TILE_Q queries of one head of q, k, v, out [heads, tokens, WIDTH]."""
    first = tl.program_id(1).to(tl.int64) * tokens * WIDTH
    query, key, width = tl.program_id(0) * TILE_Q + tl.arange(0, TILE_Q), tl.arange(0, TILE_K), tl.arange(0, WIDTH)
    at = first + query[:, None] * WIDTH + width[None, :]
    q = tl.load(q_ptr + at)
    tile = first + key[:, None] * WIDTH + width[None, :]
    top = tl.full([TILE_Q], float("-inf"), tl.float32)
    total = tl.zeros([TILE_Q], tl.float32)
    acc = tl.zeros([TILE_Q, WIDTH], tl.float32)
    for start in tl.range(0, tokens, TILE_K, num_stages=STAGES):
        k = tl.load(k_ptr + tile + start * WIDTH)
        scores = tl.dot(q, tl.trans(k))
        new_top = tl.maximum(top, tl.max(scores, 1) * scale_log2)
        weights = tl.exp2(scores * scale_log2 - new_top[:, None])
        decay = tl.exp2(top - new_top)
        total = total * decay + tl.sum(weights, 1)
        v = tl.load(v_ptr + tile + start * WIDTH)
        acc = tl.dot(weights.to(v.dtype), v, acc * decay[:, None])
        top = new_top
    tl.store(out_ptr + at, (acc / total[:, None]).to(out_ptr.dtype.element_ty))


def dense_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, tile_q: int, tile_k: int
) -> torch.Tensor:
    """Of q, k, v [heads, tokens, D], 16 bits, contiguous; tokens a multiple of both tiles, D a power of 2."""
    heads, tokens, width = q.shape
    out = torch.empty_like(q)
    dense_kernel[(tokens // tile_q, heads)](
        q, k, v, out, tokens, scale * 1.4426950408889634,
        TILE_Q=tile_q, TILE_K=tile_k, WIDTH=width, STAGES=3 if tile_k < 128 else 2,
        num_warps=8 if tile_q == 128 else 4, enable_fp_fusion=True,
    )  # fmt: skip
    return out
