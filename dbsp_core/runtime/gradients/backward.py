"""Dual-balanced attention with gradients: the executor's forward, and its backward along the same route and ring.

What is kept is at the owners: packed q, the first slot of k and v, out and its log-sum-exp. Later slots travel again.
So do needed keys of further chunks, from k and v outside attention, which are kept for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.autograd.function import once_differentiable

from dbsp_core.comm.groups import PendingTransfer, SequenceGroup
from dbsp_core.planning.plan import Plan
from dbsp_core.runtime.kernel_tables import RingStepTable
from dbsp_core.runtime.rank_plan import RankPlan
from dbsp_core.runtime.ring import hand_over, keys_to_come, ring_attention
from dbsp_kernels import BackwardInputs, Kernel, KernelInputs, block_attention_backward

__all__ = ["Executor", "attention_with_gradients"]


class Executor(Protocol):
    """What is used of a `DualBalancedAttention`, which describes it."""

    @property
    def part(self) -> RankPlan: ...
    @property
    def plan(self) -> Plan: ...
    @property
    def tables(self) -> tuple[RingStepTable, ...]: ...
    @property
    def group(self) -> SequenceGroup: ...
    def kernel_for(self, q: torch.Tensor, *, backward: bool = False) -> Kernel: ...
    def check_gradient(self, dout: torch.Tensor) -> None: ...


def attention_with_gradients(
    executor: Executor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
) -> torch.Tensor:
    """As the executor computes it; backward is collective, like forward. q, k, v: [B, H, n_local, D]"""
    out: torch.Tensor = _Attention.apply(q, k, v, executor, scale)
    return out


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        executor: Executor,
        scale: float,
    ) -> torch.Tensor:
        grid, route, group = executor.plan.grid, executor.part.route, executor.group
        batch, _, _, width = q.shape
        packed_q, packed_kv = route.dispatch(q, k, v, group)
        rows = packed_q.view(-1, grid.block_q, width)
        slot = packed_kv.view(2, batch, -1, grid.block_k, width)
        out, lse = ring_attention(
            rows,
            lambda: slot,
            keys_to_come(route, k, v, executor.plan.strategy, group),
            executor.tables,
            scale,
            executor.kernel_for(q, backward=True),
            executor.part.head_layout,
            lse=True,
        )
        ctx.executor, ctx.scale, ctx.shape = executor, scale, q.shape
        ctx.save_for_backward(rows, slot, out, lse, *((k, v) if route.fetch_exchanges else ()))
        return route.combine(out.view(batch, -1, width), q, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        executor: Executor = ctx.executor
        rows, slot, out, lse, *at_home = ctx.saved_tensors
        executor.check_gradient(dout)
        route, group, wide = executor.part.backward_route, executor.group, lse.dtype
        batch, width = ctx.shape[0], ctx.shape[3]
        # 1. dOut to the owners of rows, as queries came to them.
        dout_rows = route.to_owners(dout, group).view(rows.shape)
        # 2. The ring again, or all chunks: dQ stays, dK and dV travel with their slot.
        call = _Call(executor, rows, out, lse, dout_rows, ctx.scale)
        dq, *dkv = _chunks_backward(call, slot, *at_home) if at_home else _ring_backward(call, slot)
        # 3. Back to the layout outside attention, summed over the readers of each key.
        first, *fetched = (one.reshape(2, batch, -1, width) for one in dkv)
        grads = route.from_owners(dq.view(batch, -1, width), first, fetched, ctx.shape, group)
        return (*(grad.to(rows.dtype) if wide != rows.dtype else grad for grad in grads), None, None)


@dataclass(frozen=True, eq=False)
class _Call:
    """One attention at its owner. rows, out, dout: [B·Rq, Bq, D]; lse: [B·Rq, Bq], of all periods together"""

    executor: Executor
    rows: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor
    dout: torch.Tensor
    scale: float

    def period(self, period: int, slot: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """One period's part of dq [B·Rq, Bq, D], and dk, dv of its keys and values `slot`, [2, B, Ck, Bk, D].

        With the whole attention's log-sum-exp, periods need no merging.
        """
        table, transposed = self.executor.tables[period], self.executor.part.transposed[period]
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
        dq, dk, dv = block_attention_backward(inputs, self.executor.kernel_for(self.rows, backward=True))
        return dq, torch.stack([dk, dv]).view(slot.shape)


def _ring_backward(call: _Call, slot: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """All periods of one attention's backward on one rank.

    slot: [2, B, Ck, Bk, D], the first
    returns: dq [B·Rq, Bq, D] and dk, dv of the first slot, [2, B, Ck, Bk, D], of lse's dtype

    Keys make y − 1 hand-overs, as in the forward; their gradients y, one period behind: after period i a rank adds
    what came from ring rank r + 1 to its own and hands the sum to r − 1. The last hand-over brings every slot's sums
    to the rank that the slot started from.
    """
    strategy, group, tables = call.executor.plan.strategy, call.executor.group, call.executor.tables
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
    """All chunks of needed keys; further ones are fetched again beside the kernels of those before them.

    first: [2, B, Ck, Bk, D], the first chunk;  k, v: [B, H, n_local, D], outside attention
    returns: dq [B·Rq, Bq, D] and by chunk dk, dv, [2, B, Ck, Bk, D], of lse's dtype
    """
    fetched = call.executor.part.route.fetch(k, v, call.executor.group)
    dq = torch.zeros_like(call.rows, dtype=call.lse.dtype)
    chunk, dkv = first, []
    for period in range(len(call.executor.tables)):
        coming = next(fetched, None)
        dq_part, here = call.period(period, chunk)
        dq += dq_part
        dkv.append(here)
        if coming is not None:
            chunk = coming.wait()
    return dq, *dkv
