"""Tensors that every rank has whole next to a shared sequence: their attention to the shared keys, and gradients.

Audio next to video, for example. Every rank computes identically all that is made of it.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from dbsp_core.comm.consistency import INFERENCE_TENSORS, needs_gradients, unfollowed
from dbsp_core.comm.groups import SequenceGroup
from dbsp_core.utils.errors import UserError
from dbsp_kernels import (
    BackwardInputs,
    Kernel,
    KernelInputs,
    block_attention_backward,
    choose_kernel,
    merge_states,
)

BLOCK = 64
"""Tokens of a kernel's rows and blocks."""


def attend_shared_keys(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, group: SequenceGroup
) -> torch.Tensor:
    """Computes attention of queries that every rank has, to keys of which each has its own. Collective, also backward.

    1. Each rank attends to its own keys.
    2. Outputs and log-sum-exps of all ranks are gathered: as much as the queries, not as the keys.
    3. Every rank merges them by log-sum-exp, in the order of ranks.

    Of the output's gradient each rank has its part of a sum, as of all that every rank has (`count_gradient_once`).
    Backward adds the parts up; from the whole gradient, and out and log-sum-exp over all keys, each rank has the
    gradients of its own keys and values, and its part of the queries'.

    Args:
        q: [B, H, n, D], the same on every rank.
        k, v: [B, H, m, D], this rank's, without padding; m may be 0 and differ between ranks.
        scale: Softmax scale.

    Returns:
        [B, H, n, D], bitwise identical on every rank.

    Raises:
        UserError: For tensors whose derivatives would be lost.
    """
    problem = unfollowed(q, k, v)
    if problem is None and needs_gradients(q, k, v) and any(t.is_inference() for t in (q, k, v)):
        problem = INFERENCE_TENSORS
    if problem is not None:
        raise UserError(problem)
    out: torch.Tensor = _SharedKeys.apply(q, k, v, scale, group)
    return out


class _SharedKeys(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, group: SequenceGroup
    ) -> torch.Tensor:
        attended = _kernel_for(q).run(_in_blocks(q, k, v, scale))
        out, lse = (part.reshape(*q.shape[:2], -1, *part.shape[2:])[:, :, : q.shape[2]] for part in attended)
        if group.size > 1:
            gathered = group.all_gather(torch.cat([out.to(lse.dtype), lse[..., None]], dim=-1))
            parts = [(part[..., :-1], part[..., -1]) for part in gathered]
            out, lse = functools.reduce(lambda merged, part: merge_states(*merged, *part), parts)
        ctx.scale, ctx.group = scale, group
        ctx.save_for_backward(q, k, v, out, lse)
        return out.to(q.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        dout = _sum(dout.to(lse.dtype), ctx.group)
        inputs, heads = _in_blocks(q, k, v, ctx.scale), len(q) * q.shape[1]
        turned = _item_table(heads, len(inputs.k) // heads, len(inputs.q) // heads, q.device)
        rows = _blocks(dout.to(q.dtype)), _blocks(out), _blocks(lse[..., None]).squeeze(-1)
        grads = block_attention_backward(BackwardInputs(inputs, *rows, lambda: (*turned, None)), _kernel_for(q))
        whole = zip(grads, (q, k, v), strict=True)
        tokens = (grad.view(*tensor.shape[:2], -1, tensor.shape[3])[:, :, : tensor.shape[2]] for grad, tensor in whole)
        return (*(grad.to(q.dtype) for grad in tokens), None, None)


def _kernel_for(q: torch.Tensor) -> Kernel:
    """Returns db-SP's own kernel on q's device, for any kernel of the shared sequence."""
    return choose_kernel("triton" if q.is_cuda else "cpu", q.device, q.dtype)


def _in_blocks(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> KernelInputs:
    """Builds a block kernel's inputs for q [B, H, n, D] that attends to all of k and v [B, H, m, D]."""
    heads, keys = len(q) * q.shape[1], k.shape[2]
    rows, blocks = _blocks(q), _blocks(k)
    tables = _item_table(heads, len(rows) // heads, len(blocks) // heads, q.device)
    first = torch.arange(0, keys, BLOCK, device=q.device)
    kv_len = (keys - first).clamp(max=BLOCK).to(torch.int32).repeat(heads)
    full = torch.full_like(tables[1], keys // BLOCK)
    return KernelInputs(rows, blocks, _blocks(v), *tables, kv_len, scale, full)


def _item_table(items: int, rows: int, blocks: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns kv_index int32[items · rows, blocks] and kv_count of rows that attend to all blocks of their item."""
    every = torch.arange(items * blocks, dtype=torch.int32, device=device).view(items, blocks)
    return every.repeat_interleave(rows, 0), torch.full((items * rows,), blocks, dtype=torch.int32, device=device)


def _blocks(tokens: torch.Tensor) -> torch.Tensor:
    """Reshapes [B, H, n, D] → [B · H · ceil(n / BLOCK), BLOCK, D], with zeros behind the last token."""
    padded = torch.nn.functional.pad(tokens, (0, 0, 0, -tokens.shape[2] % BLOCK))
    return padded.reshape(-1, BLOCK, tokens.shape[3])


def count_gradient_once(output: torch.Tensor, group: SequenceGroup) -> torch.Tensor:
    """Returns an output that every rank has whole, with the gradient on the first rank alone; the others have zeros.

    Every rank computes the whole loss, and the gradients of its parameters are its part of a sum over the group:
    without this an output that is computed P times would count P times.
    """
    if group.size == 1:
        return output
    counted: torch.Tensor = _CountedOnce.apply(output, group.rank)
    return counted


class _CountedOnce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, rank: int) -> torch.Tensor:
        ctx.rank = rank
        return output.view_as(output)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, None]:
        return gradient if ctx.rank == 0 else torch.zeros_like(gradient), None


def sum_gradient(whole: torch.Tensor, group: SequenceGroup) -> torch.Tensor:
    """Returns a tensor that was made whole for what every rank computes identically.

    Of its gradient each rank has its part of a sum, and what made the tensor whole wants all of it (`gather_shards`):
    backward adds the parts up. Collective in backward.
    """
    if group.size == 1:
        return whole
    summed: torch.Tensor = _Summed.apply(whole, group)
    return summed


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, group: SequenceGroup) -> torch.Tensor:
        ctx.group = group
        return whole.view_as(whole)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, None]:
        return _sum(gradient, ctx.group), None


def _sum(mine: torch.Tensor, group: SequenceGroup) -> torch.Tensor:
    """Returns the sum over ranks, in their order: bitwise identical on each."""
    return functools.reduce(torch.add, group.all_gather(mine))
