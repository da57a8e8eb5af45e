"""FlexAttention over the packed rows, as one head: on CUDA the fallback for Triton, and its yardstick."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch

from dbsp_kernels.backward import BackwardInputs, Gradients, TransposedTable, backward_by_autograd
from dbsp_kernels.errors import UserError
from dbsp_kernels.inputs import KernelInputs
from dbsp_kernels.kernel import HALVES, Kernel
from dbsp_kernels.merge import PartialAttention

__all__ = [
    "BLOCKS",
    "KERNEL",
    "flex_attention_packed",
    "flex_attention_packed_backward",
    "packed_block_mask",
    "why_unavailable",
]

BLOCKS = frozenset((q, k) for q in (64, 128) for k in (64, 128))

RECOMPILE_LIMIT = 256
"""Most variants compiled in one process; torch's own limit is 8."""


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
    transposed: TransposedTable | None = None,
) -> Any:
    """FlexAttention's BlockMask for packed rows: entries before kv_full are full blocks, the others are masked.

    The backward needs `transposed`; all short blocks, and no others, must then be beyond kv_full.
    """
    from torch.nn.attention.flex_attention import BlockMask

    block_q, block_k = blocks
    column = torch.arange(kv_index.shape[1], device=kv_index.device)
    rest = (kv_full[:, None] + column).clamp(max=max(0, kv_index.shape[1] - 1))

    def within(batch: Any, head: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return key % block_k < kv_len[key // block_k]

    mask = BlockMask.from_kv_blocks(
        kv_num_blocks=(kv_count - kv_full)[None, None],
        kv_indices=kv_index.gather(1, rest)[None, None],
        full_kv_num_blocks=kv_full[None, None].contiguous(),
        full_kv_indices=kv_index[None, None].contiguous(),
        BLOCK_SIZE=blocks,
        mask_mod=within,
        seq_lengths=(len(kv_index) * block_q, len(kv_len) * block_k),
        compute_q_blocks=False,
    )
    if transposed is None:
        return mask
    short, rows = kv_len < block_k, transposed.rows[None, None].contiguous()
    return BlockMask(
        mask.seq_lengths,
        mask.kv_num_blocks,
        mask.kv_indices,
        mask.full_kv_num_blocks,
        mask.full_kv_indices,
        q_num_blocks=transposed.count.masked_fill(~short, 0)[None, None],
        q_indices=rows,
        full_q_num_blocks=transposed.count.masked_fill(short, 0)[None, None],
        full_q_indices=rows,
        BLOCK_SIZE=mask.BLOCK_SIZE,
        mask_mod=mask.mask_mod,
    )


@functools.cache
def _compiled() -> Any:
    """FlexAttention, compiled under a code object of its own, so that nobody else's variants count towards its limit.

    Past dynamo's recompile limit a plain `torch.compile` would run FlexAttention eagerly, which ignores block lists
    and computes dense attention without a word; with `fullgraph` it raises.
    """
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    def packed(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any, scale: float, options: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        out, others = flex_attention(
            q, k, v, block_mask=mask, scale=scale, kernel_options=options, return_aux=AuxRequest(lse=True)
        )
        return out, others.lse

    return torch.compile(packed, fullgraph=True, dynamic=True)


def flex_attention_packed(inputs: KernelInputs) -> PartialAttention:
    """The contract of `dbsp_kernels.block_attention`.

    Raises UserError beyond RECOMPILE_LIMIT variants of dtype, D, block sizes and the like in one process.
    """
    return _attend(inputs, None)


def flex_attention_packed_backward(inputs: BackwardInputs) -> Gradients:
    """The contract of `dbsp_kernels.block_attention_backward`, by FlexAttention's own backward."""
    return backward_by_autograd(lambda given: _attend(given, inputs.transposed()))(inputs)


def _attend(inputs: KernelInputs, transposed: TransposedTable | None) -> PartialAttention:
    """Attends; autograd can follow if `transposed` is given."""
    q, k, kv_index, kv_count, kv_full = inputs.q, inputs.k, inputs.kv_index, inputs.kv_count, inputs.kv_full
    if len(q) == 0 or len(k) == 0 or kv_index.shape[1] == 0:
        return torch.zeros_like(q), torch.full(q.shape[:2], -torch.inf, device=q.device, dtype=torch.float32)
    if kv_full is None and transposed is not None:
        raise ValueError("FlexAttention's backward needs kv_full, by which it tells short blocks")
    blocks, full = inputs.blocks, torch.zeros_like(kv_count) if kv_full is None else kv_full
    mask = packed_block_mask(kv_index, kv_count, inputs.kv_len, full, blocks, transposed)
    # Not its decoding kernel, which it would take for few queries. Its tiles must divide the blocks; where both are
    # 128, its own choice does.
    options = {"BACKEND": "TRITON"} | ({} if blocks == (128, 128) else {"BLOCK_M": blocks[0], "BLOCK_N": 64})
    one_head = (t.reshape(1, 1, -1, t.shape[-1]) for t in (q, k, inputs.v))
    from torch._dynamo import config, exc  # takes seconds, which nobody else should wait for

    with config.patch(recompile_limit=RECOMPILE_LIMIT):
        try:
            out, lse = _compiled()(*one_head, mask, inputs.scale, options)
        except exc.FailOnRecompileLimitHit as error:
            raise UserError(
                f"kernel 'flex' has been compiled for {RECOMPILE_LIMIT} variants of dtype, sizes and blocks in this "
                "process, its limit; use triton"
            ) from error
    out, lse = out.view(q.shape), lse.view(q.shape[:2])
    empty = kv_count[:, None] == 0  # guarded, whatever FlexAttention makes of rows without blocks
    return out.masked_fill(empty[..., None], 0.0), lse.masked_fill(empty, -torch.inf)


KERNEL = Kernel(
    name="flex",
    run=flex_attention_packed,
    backward=flex_attention_packed_backward,
    devices=frozenset({"cuda"}),
    dtypes=HALVES | {torch.float32},
    blocks=lambda *_: BLOCKS,
    widths=range(16, 257),
    why_unavailable=why_unavailable,
)
