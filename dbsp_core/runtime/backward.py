"""Dual-balanced attention with gradients: its forward, and its backward along the same route and ring.

What is kept is at the owners: packed q, the first slot of k and v, out and its log-sum-exp. Later slots travel again.
So do keys of further chunks, from k and v outside attention, which are kept for it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from dbsp_core.comm.all_to_all import KeysAtHome
from dbsp_core.comm.groups import PendingTransfer
from dbsp_core.runtime.forward import PreparedAttention, forward
from dbsp_core.runtime.ring import hand_over
from dbsp_kernels import BackwardInputs, Kernel, KernelInputs, block_attention_backward

__all__ = ["attention_with_gradients"]


def attention_with_gradients(
    prepared: PreparedAttention,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    kernel: Kernel,
    check_gradient: Callable[[torch.Tensor], None] | None,
) -> torch.Tensor:
    """Computes `forward` with gradients; backward is collective too.

    Args:
        q, k, v: [B, H, n_local, D].
        kernel: One that has a backward.
        check_gradient: Is given the output's gradient before it is used.
    """
    out: torch.Tensor = _Attention.apply(q, k, v, prepared, scale, kernel, check_gradient)
    return out


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        prepared: PreparedAttention,
        scale: float,
        kernel: Kernel,
        check_gradient: Callable[[torch.Tensor], None] | None,
    ) -> torch.Tensor:
        ctx.prepared, ctx.scale, ctx.shape = prepared, scale, q.shape
        ctx.kernel, ctx.check_gradient = kernel, check_gradient
        at_home = (k, v) if prepared.part.route.fetch_exchanges else ()
        return forward(
            prepared, q, k, v, scale, kernel, keep=lambda *at_owner: ctx.save_for_backward(*at_owner, *at_home)
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        prepared: PreparedAttention = ctx.prepared
        rows, slot, out, lse, *at_home = ctx.saved_tensors
        if ctx.check_gradient is not None:
            ctx.check_gradient(dout)
        route, group, wide = prepared.part.backward_route, prepared.group, lse.dtype
        batch, width = ctx.shape[0], ctx.shape[3]
        # 1. dOut to the owners of rows, as queries came to them.
        dout_rows = route.to_owners(dout, group).view(rows.shape)
        # 2. The ring again, or all chunks: dQ stays, dK and dV travel with their slot.
        call = _Call(prepared, ctx.kernel, rows, out, lse, dout_rows, ctx.scale)
        dq, *dkv = _chunks_backward(call, slot, *at_home) if at_home else _ring_backward(call, slot)
        # 3. Back to the layout outside attention, summed over the readers of each key.
        first, *fetched = (one.reshape(2, batch, -1, width) for one in dkv)
        grads = route.from_owners(dq.view(batch, -1, width), first, fetched, ctx.shape, group)
        return (*(grad.to(rows.dtype) if wide != rows.dtype else grad for grad in grads), None, None, None, None)


@dataclass(frozen=True, eq=False)
class _Call:
    """One attention at its owner.

    Attributes:
        rows, out, dout: [B·Rq, Bq, D].
        lse: [B·Rq, Bq], of all periods together.
    """

    prepared: PreparedAttention
    kernel: Kernel
    rows: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor
    dout: torch.Tensor
    scale: float

    def period(self, period: int, slot: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """One period's part of dq [B·Rq, Bq, D], and dk, dv of its keys and values `slot`, [2, B, Ck, Bk, D].

        With the whole attention's log-sum-exp, periods need no merging.
        """
        table, transposed = self.prepared.tables[period], self.prepared.part.transposed[period]
        keys, values = slot.flatten(1, 2).unbind(0)
        expanded, batch = table.expanded(slot.shape[1]), slot.shape[1]
        given = KernelInputs(
            self.rows,
            keys,
            values,
            expanded.kv_index,
            expanded.kv_count,
            expanded.kv_len,
            self.scale,
            expanded.kv_full,
        )
        inputs = BackwardInputs(given, self.dout, self.out, self.lse, lambda: transposed.table(table, batch))
        dq, dk, dv = block_attention_backward(inputs, self.kernel)
        return dq, torch.stack([dk, dv]).view(slot.shape)


def _ring_backward(call: _Call, slot: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """All periods of one attention's backward on one rank.

    Keys make y − 1 hand-overs, as in the forward; their gradients y, one period behind: after period i a rank adds
    what came from ring rank r + 1 to its own and hands the sum to r − 1. The last hand-over brings every slot's sums
    to the rank that the slot started from.

    Args:
        slot: [2, B, Ck, Bk, D], the first.

    Returns:
        dq [B·Rq, Bq, D] and dk, dv of the first slot, [2, B, Ck, Bk, D], of lse's dtype.
    """
    strategy, group, tables = call.prepared.plan.strategy, call.prepared.group, call.prepared.tables
    own = slot.shape[2]
    dq = torch.zeros_like(call.rows, dtype=call.lse.dtype)
    sums: torch.Tensor | None = None
    coming_sums: PendingTransfer | None = None
    for period in range(len(tables)):
        last = period + 1 == len(tables)
        next_blocks = own if last else len(tables[period + 1].kv_len)
        # 1. The next slot's keys and values start to travel.
        coming = None if last else hand_over(slot, next_blocks, strategy, group)
        # 2. This period's part of the gradients.
        dq_part, here = call.period(period, slot)
        dq += dq_part
        # 3. The sums of the slot's earlier periods, which came beside the kernel, are added and handed on.
        sums = here if coming_sums is None else here.add_(coming_sums.wait())
        if len(tables) > 1:
            coming_sums = hand_over(sums, next_blocks, strategy, group)
        if coming is not None:
            slot = coming.wait()
    if sums is None:
        raise ValueError("attention needs at least one period")
    return dq, sums if coming_sums is None else coming_sums.wait()


def _chunks_backward(call: _Call, first: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """All chunks of keys; further ones are fetched again beside the kernels of those before them.

    Args:
        first: [2, B, Ck, Bk, D], the first chunk.
        k, v: [B, H, n_local, D], outside attention.

    Returns:
        dq [B·Rq, Bq, D] and by chunk dk, dv, [2, B, Ck, Bk, D], of lse's dtype.
    """
    fetched = call.prepared.part.route.fetch(KeysAtHome(k, v), call.prepared.group)
    dq = torch.zeros_like(call.rows, dtype=call.lse.dtype)
    chunk, dkv = first, []
    for period in range(len(call.prepared.tables)):
        coming = next(fetched, None)
        dq_part, here = call.period(period, chunk)
        dq += dq_part
        dkv.append(here)
        if coming is not None:
            chunk = coming.wait()
    return dq, *dkv
