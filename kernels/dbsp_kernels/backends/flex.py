"""FlexAttention over the packed rows, as one head: on CUDA the fallback for Triton, and its yardstick."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch

from dbsp_kernels.inputs import KernelInputs
from dbsp_kernels.merge import PartialAttention

__all__ = ["BLOCKS", "flex_attention_packed", "packed_block_mask", "why_unavailable"]

BLOCKS = frozenset((q, k) for q in (64, 128) for k in (64, 128))


def why_unavailable() -> str | None:
    """Why this kernel cannot work here, or None."""
    try:
        from torch.nn.attention.flex_attention import BlockMask
    except ImportError:
        return "this torch has no FlexAttention; torch 2.8 and newer have it"
    if "compute_q_blocks" not in inspect.signature(BlockMask.from_kv_blocks).parameters:
        return "this torch's FlexAttention always makes the backward's tables, rows × blocks large; use torch 2.11"
    if not torch.cuda.is_available():
        return "on the CPU, FlexAttention ignores block lists"
    return None


def packed_block_mask(
    kv_index: torch.Tensor,
    kv_count: torch.Tensor,
    kv_len: torch.Tensor,
    kv_full: torch.Tensor,
    blocks: tuple[int, int],
) -> Any:
    """FlexAttention's BlockMask for packed rows: entries before kv_full are full blocks, the others are masked."""
    from torch.nn.attention.flex_attention import BlockMask

    block_q, block_k = blocks
    column = torch.arange(kv_index.shape[1], device=kv_index.device)
    rest = (kv_full[:, None] + column).clamp(max=max(0, kv_index.shape[1] - 1))

    def within(batch: Any, head: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return key % block_k < kv_len[key // block_k]

    return BlockMask.from_kv_blocks(
        kv_num_blocks=(kv_count - kv_full)[None, None],
        kv_indices=kv_index.gather(1, rest)[None, None],
        full_kv_num_blocks=kv_full[None, None].contiguous(),
        full_kv_indices=kv_index[None, None].contiguous(),
        BLOCK_SIZE=blocks,
        mask_mod=within,
        seq_lengths=(len(kv_index) * block_q, len(kv_len) * block_k),
        compute_q_blocks=False,
    )


@functools.cache
def _compiled() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention)


def flex_attention_packed(inputs: KernelInputs) -> PartialAttention:
    """The contract of `dbsp_kernels.block_attention`."""
    q, k, kv_index, kv_count, kv_full = inputs.q, inputs.k, inputs.kv_index, inputs.kv_count, inputs.kv_full
    if len(q) == 0 or len(k) == 0 or kv_index.shape[1] == 0:
        return torch.zeros_like(q), torch.full(q.shape[:2], -torch.inf, device=q.device, dtype=torch.float32)
    blocks, full = inputs.blocks, torch.zeros_like(kv_count) if kv_full is None else kv_full
    mask = packed_block_mask(kv_index, kv_count, inputs.kv_len, full, blocks)
    # Its tiles must divide the blocks; where both are 128, its own choice does.
    options = None if blocks == (128, 128) else {"BLOCK_M": blocks[0], "BLOCK_N": 64}
    one_head = (t.reshape(1, 1, -1, t.shape[-1]) for t in (q, k, inputs.v))
    out, lse = _compiled()(*one_head, block_mask=mask, scale=inputs.scale, return_lse=True, kernel_options=options)
    out, lse = out.view(q.shape), lse.view(q.shape[:2])
    empty = kv_count[:, None] == 0  # guarded, whatever FlexAttention makes of rows without blocks
    return out.masked_fill(empty[..., None], 0.0), lse.masked_fill(empty, -torch.inf)
