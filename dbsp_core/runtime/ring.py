"""The ring: KV slots rotate, each period's kernel runs beside the rotation, partial results merge by log-sum-exp.

Others come in chunks instead, one a period, fetched from where they are beside the kernels of earlier periods.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

import torch

from dbsp_core.comm.groups import PendingTransfer, SequenceGroup
from dbsp_core.layout.strategy import Strategy
from dbsp_core.runtime.kernel_tables import RingStepTable
from dbsp_kernels import (
    DenseHeadLayout,
    Kernel,
    PartialAttention,
    attend_dense_part,
    block_attention,
    dense_supported,
    merge_into,
)

__all__ = ["Pending", "hand_over", "ring_attention"]


class Pending(Protocol):
    """Keys and values in flight. wait: returns [2, B, Ck, Bk, W]"""

    def wait(self) -> torch.Tensor: ...


def ring_attention(
    q: torch.Tensor,
    first_slot: Callable[[], torch.Tensor],
    next_keys: Callable[[torch.Tensor, int], Pending],
    tables: tuple[RingStepTable, ...],
    scale: float,
    kernel: Kernel,
    head_layout: DenseHeadLayout | None = None,
    *,
    lse: bool = False,
    read: Callable[[torch.Tensor], torch.Tensor] = lambda written: written,
) -> PartialAttention:
    """All periods of one attention on one rank.

    In period i, ring rank r computes with slot (r + i) mod y: after each period a rank hands its slot to ring rank
    r − 1 and takes the next one from r + 1. The hand-over starts before the period's kernel and is waited for after.
    Each period's result is merged into the running one, in at least 32 bits until the last.

    Args:
        q: [B·Rq, Bq, D], the rank's packed rows.
        first_slot: Hands over [2, B, Ck, Bk, W], keys and values of the slot it starts with: called once, so that
            nobody else holds them while other slots pass.
        next_keys: Starts the transfer of the next period's keys: (this period's, blocks of the next) → those coming.
        tables: One per period, not yet expanded for the batch.
        head_layout: Says that rows are those of whole heads; see `dbsp_kernels.block_attention`.
        lse: Whether the log-sum-exp is wanted.
        read: Makes [2, B, Ck, Bk, D] of q's dtype of keys and values as they are written on their way. What is handed
            on is as it came.

    Returns:
        out [B·Rq, Bq, D] and its log-sum-exp [B·Rq, Bq].
    """
    kv = first_slot()
    batch, several = kv.shape[1], len(tables) > 1
    running = None
    to_do = deque(tables)
    while to_do:
        table = to_do.popleft()
        coming = None  # what has come is not held while more sets off
        if to_do:
            coming = next_keys(kv, len(to_do[0].kv_len))
        more = coming is not None
        kv = read(kv)
        keys, values = kv.flatten(1, 2).unbind(0)
        dense = table.dense if kernel.returns_lse and dense_supported(q) else None
        if dense is not None:
            table = replace(table, kv_count=dense.kv_count, kv_full=dense.kv_full)
        wide = torch.promote_types(q.dtype, torch.float32)
        if dense is None or not dense.every:
            running = block_attention(
                q,
                keys,
                values,
                **vars(table.expanded(batch)),
                scale=scale,
                kernel=kernel,
                partial=running,
                out_dtype=wide if more or dense is not None else q.dtype,
                head_layout=head_layout and DenseHeadLayout(head_layout.heads * batch, head_layout.tokens),
                lse=lse or several or dense is not None,
            )
        if dense is not None:
            running = _with_dense_rows(running, q, keys, values, table, batch, scale, kernel)
            running = (running[0] if more else running[0].to(q.dtype)), running[1]
        del keys, values  # or the slot that has been handed over would be held while the next but one comes
        if coming is not None:
            kv = coming.wait()
    if running is None:
        raise ValueError("ring_attention needs at least one period")
    return running[0].to(q.dtype), running[1]


def _with_dense_rows(
    running: PartialAttention | None,
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    table: RingStepTable,
    batch: int,
    scale: float,
    kernel: Kernel,
) -> PartialAttention:
    """Merges the dense rows' attention to this period's keys into the running result, which is None before the first.

    Rows that torch has no fused kernel for run on `kernel`.
    """
    if running is None:
        wide = torch.promote_types(q.dtype, torch.float32)
        running = (
            torch.zeros_like(q, dtype=wide),
            torch.full(q.shape[:2], -torch.inf, dtype=wide, device=q.device),
        )
    q, keys, values, all_out, all_lse = (t.unflatten(0, (batch, -1)) for t in (q, keys, values, *running))
    for part in table.dense.parts if table.dense else ():
        rows = slice(*part.rows)
        found = attend_dense_part(q, keys, values, part, table.kv_len, scale, kernel)
        merge_into(all_out[:, rows], all_lse[:, rows], *found)
    return running


def hand_over(kv: torch.Tensor, next_blocks: int, strategy: Strategy, group: SequenceGroup) -> PendingTransfer:
    """Starts to send this slot to the previous ring rank and to receive the next one, of `next_blocks` blocks."""
    ring_rank, column = divmod(group.rank, strategy.ulysses)
    previous = (ring_rank - 1) % strategy.ring * strategy.ulysses + column
    following = (ring_rank + 1) % strategy.ring * strategy.ulysses + column
    shape = (*kv.shape[:2], next_blocks, *kv.shape[3:])
    return group.shift(kv, to=previous, received_shape=shape, source=following)
