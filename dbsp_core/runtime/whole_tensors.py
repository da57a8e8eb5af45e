"""Replicated tensors (such as audio) next to a sharded sequence: attention to the sharded keys, and gradients.

Every rank computes everything derived from a replicated tensor identically.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
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
"""Tokens per row and block of the kernel."""


def attend_shared_keys(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, group: SequenceGroup
) -> torch.Tensor:
    """Computes attention of replicated queries to sharded keys. Collective, also in backward.

    1. Each rank attends to its own keys.
    2. Outputs and log-sum-exps of all ranks are gathered, which are as large as the queries.
    3. Every rank merges them by log-sum-exp, in order of ranks.

    Each rank has a summand of the output's gradient (see `count_gradient_once`). Backward sums them, then computes
    gradients of the rank's own keys and values and its summand of the queries' gradient.

    Args:
        q: [B, H, n, D], equal on every rank.
        k, v: [B, H, m, D], this rank's tokens without padding; m may be 0 and differ between ranks.

    Returns:
        [B, H, n, D], bitwise identical on every rank.

    Raises:
        UserError: Derivatives of the tensors would be lost.
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
    """Returns db-SP's kernel on q's device, whatever kernel the sharded sequence uses."""
    return choose_kernel("triton" if q.is_cuda else "cpu", q.device, q.dtype)


def _in_blocks(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> KernelInputs:
    """Builds kernel inputs for q [B, H, n, D] attending to all of k and v [B, H, m, D]."""
    heads, keys = len(q) * q.shape[1], k.shape[2]
    rows, blocks = _blocks(q), _blocks(k)
    tables = _item_table(heads, len(rows) // heads, len(blocks) // heads, q.device)
    first = torch.arange(0, keys, BLOCK, device=q.device)
    kv_len = (keys - first).clamp(max=BLOCK).to(torch.int32).repeat(heads)
    full = torch.full_like(tables[1], keys // BLOCK)
    return KernelInputs(rows, blocks, _blocks(v), *tables, kv_len, scale, full)


def _item_table(items: int, rows: int, blocks: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns kv_index int32[items · rows, blocks] and kv_count for rows that attend to all blocks of their item."""
    every = torch.arange(items * blocks, dtype=torch.int32, device=device).view(items, blocks)
    return every.repeat_interleave(rows, 0), torch.full((items * rows,), blocks, dtype=torch.int32, device=device)


def _blocks(tokens: torch.Tensor) -> torch.Tensor:
    """Reshapes [B, H, n, D] → [B · H · ceil(n / BLOCK), BLOCK, D], padded with zeros."""
    padded = torch.nn.functional.pad(tokens, (0, 0, 0, -tokens.shape[2] % BLOCK))
    return padded.reshape(-1, BLOCK, tokens.shape[3])


def count_gradient_once(output: torch.Tensor, group: SequenceGroup) -> torch.Tensor:
    """Returns a replicated output whose gradient is kept on the first rank and zero on others.

    Every rank computes the whole loss, and parameter gradients are summed over the group, so an output computed on P
    ranks would otherwise count P times.
    """
    if group.size == 1:
        return output
    counted: torch.Tensor = _WithGradient.apply(
        output, lambda gradient: gradient if group.rank == 0 else torch.zeros_like(gradient)
    )
    return counted


def sum_gradient(whole: torch.Tensor, group: SequenceGroup) -> torch.Tensor:
    """Returns a gathered tensor (see `gather_shards`) for replicated computation. Collective in backward.

    Each rank has a summand of its gradient; backward sums them.
    """
    if group.size == 1:
        return whole
    summed: torch.Tensor = _WithGradient.apply(whole, functools.partial(_sum, group=group))
    return summed


class _WithGradient(torch.autograd.Function):
    """Returns a view of the tensor; backward calls a function of its gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, of_gradient: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        ctx.of_gradient = of_gradient
        return tensor.view_as(tensor)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.of_gradient(gradient), None


def _sum(mine: torch.Tensor, group: SequenceGroup) -> torch.Tensor:
    """Returns the sum in order of ranks, bitwise identical on each."""
    return functools.reduce(torch.add, group.all_gather(mine))
