"""One attention on one rank: dispatch, fetch, attend, combine. Backward uses the same tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from dbsp_core.comm.block_pooling import mean_of_tokens
from dbsp_core.comm.consistency import ConcurrencyGuard, InputKind, MeetingGroup, input_kind, raised_on_all
from dbsp_core.comm.exchange import Dispatch, LocalKeys
from dbsp_core.runtime.backward import attention_backward
from dbsp_core.runtime.prepared import PreparedAttention
from dbsp_core.runtime.tables import DenseRows, KernelTable
from dbsp_core.utils.errors import UserError
from dbsp_kernels import (
    DensePart,
    Kernel,
    PartialAttention,
    attend_dense_part,
    block_attention,
    checks_values,
    fused_kernel,
    merge_into,
)
from dbsp_kernels.row_parts import LONG_ROW

CheckGradient = Callable[[torch.Tensor], None]
"""Checks the output's gradient before use."""

Keep = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]
"""Saves tensors for backward: rows [B·Rq, Bq, D], the first chunk [2, B, Ck, Bk, D], out and its log-sum-exp."""


def attend(
    prepared: PreparedAttention,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    check_gradient: CheckGradient | None = None,
    dispatch: Dispatch | None = None,
) -> torch.Tensor:
    """Computes attention under a prepared plan and mask. Collective, also in backward.

    q, k and v are [B, H, n_local, D], already checked across ranks; `dispatch` has the same from `start_dispatch`, if
    they are in flight. Returns [B, H, n_local, D]; with masks per batch item, [1, B · H, n_local, D] (items folded
    into heads). Raises UserError if gradients are needed but not supported, or no kernel supports the inputs.
    """
    kind = input_kind(q, k, v)
    if kind not in prepared.kernels:
        prepared.kernel_for(kind)  # raises before any exchange
    if kind[-1] and prepared.no_gradients is not None:
        raise UserError(prepared.no_gradients)
    dispatch = dispatch or start_dispatch(prepared, q, k, v)
    if not kind[-1]:
        return _forward(prepared, dispatch, scale, kind)
    out: torch.Tensor = _Attention.apply(q, k, v, dispatch, prepared, scale, kind, check_gradient)
    return out


@torch.no_grad()
def start_dispatch(prepared: PreparedAttention, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Dispatch:
    """Starts sending q, k and v for a later `attend`; needs the plan but not the mask. Collective."""
    if len(prepared.plan.owner) != q.shape[1]:
        q, k, v = (tensor.flatten(0, 1).unsqueeze(0) for tensor in (q, k, v))
    less = (mean_of_tokens(k, prepared.layout, prepared.group), None) if prepared.plan.comm_dtype.is_int8 else ()
    return prepared.route.start(q, LocalKeys(k, v, less), prepared.group)


class _Attention(torch.autograd.Function):
    """Saves rows, the first chunk, out and log-sum-exp at owners; backward fetches later chunks again."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        dispatch: Dispatch,
        prepared: PreparedAttention,
        scale: float,
        kind: InputKind,
        check_gradient: CheckGradient | None,
    ) -> torch.Tensor:
        ctx.prepared, ctx.scale, ctx.kernel = prepared, scale, prepared.kernels[kind]
        ctx.check_gradient, ctx.shape = check_gradient, q.shape
        local_kv = dispatch.keys[:2] if prepared.route.fetch_exchanges else ()
        return _forward(
            prepared, dispatch, scale, kind, keep=lambda *at_owner: ctx.save_for_backward(*at_owner, *local_kv)
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        prepared, saved = ctx.prepared, ctx.saved_tensors  # unpacking recomputes checkpoints
        with ConcurrencyGuard(prepared.group):
            if ctx.check_gradient is not None:
                ctx.check_gradient(dout)
            if isinstance(prepared.group, MeetingGroup):  # as in the first forward
                with raised_on_all(prepared.group.within) as group:
                    grads = attention_backward(replace(prepared, group=group), saved, dout, ctx.scale, ctx.kernel)
            else:
                grads = attention_backward(prepared, saved, dout, ctx.scale, ctx.kernel)
        return (*(grad.view(ctx.shape) for grad in grads), None, None, None, None, None)


def _forward(
    prepared: PreparedAttention,
    dispatch: Dispatch,
    scale: float,
    kind: InputKind,
    keep: Keep | None = None,
) -> torch.Tensor:
    """Computes `attend` without autograd; calls `keep`, if not None, with the tensors for backward."""
    route, group, plan, kernel = prepared.route, prepared.group, prepared.plan, prepared.kernels[kind]
    int8 = plan.comm_dtype if plan.comm_dtype.is_int8 else None
    q, (batch, _, _, head_dim) = dispatch.q, dispatch.q.shape
    # 1. Receive queries at the owners of rows, with keys and values of the rank's own ring row
    packed_q, chunk = route.arrive(dispatch, group)
    first = [chunk]
    rows = packed_q if int8 is None else int8.read(packed_q, q)
    rows = rows.view(-1, plan.grid.block_q, head_dim)  # [B, 1, Rq·Bq, D] → [B·Rq, Bq, D]
    del packed_q, chunk  # free before the remaining chunks run
    kept = None if keep is None else first[0]
    # 2. Fetch keys and values of other ring rows, each chunk while the kernel runs on the previous one
    chunks: Iterator[torch.Tensor] = route.chunks(first, dispatch.keys, group)
    if int8 is not None:
        chunks = map(partial(int8.read, like=q), chunks)
    # 3. Run the kernel once per chunk and merge by log-sum-exp; on a GPU, cut long rows by keys
    dense_rows, slots = prepared.tables.dense, kernel.slots and kernel.slots(q, (plan.grid.block_q, plan.grid.block_k))
    apart = any(dense_rows) and kernel.returns_lse and fused_kernel(rows) is not None
    cut = slots is not None and plan.row_share(slots) >= LONG_ROW * batch
    tables = prepared.tables.expanded(batch, slots, cut=cut, dense=apart)
    head_tokens, absent = prepared.table_layout.head_tokens, prepared.absent
    lse = keep is not None or len(tables) > 1 or absent is not None
    running, last = None, None if absent else tables[-1]  # the last chunk's result is rounded
    check = kind not in prepared.attended or checks_values(q.device)
    for table, dense in zip(tables, dense_rows, strict=True):
        dtype = q.dtype if table is last else torch.promote_types(q.dtype, torch.float32)
        of_chunk = table, dense if apart else None
        running = _attend(running, rows, next(chunks), *of_chunk, scale, kernel, head_tokens, dtype, lse, check=check)
    prepared.attended.add(kind)
    if running is None:
        raise ValueError("attention needs at least one chunk of keys")
    if absent is not None:
        running = absent.added_to(running, rows, batch, scale, next(iter(dispatch.keys.less), None))
    out = running[0].to(q.dtype)
    if keep is not None and kept is not None:
        keep(rows, kept, out, running[1])
    # 4. Send the output back, after freeing the inputs
    del rows, kept, chunks, running
    at_owner = [out.view(batch, 1, -1, head_dim)]
    del out
    local = route.combine(at_owner.pop(), q, group)
    if prepared.branch is not None:
        prepared.branch.add_to(local)
    return local


def _attend(
    running: PartialAttention | None,
    rows: torch.Tensor,
    kv: torch.Tensor,
    table: KernelTable,
    dense: DenseRows | None,
    scale: float,
    kernel: Kernel,
    head_tokens: int | None,
    out_dtype: torch.dtype,
    lse: bool,
    *,
    check: bool,
) -> PartialAttention:
    """Merges a chunk kv [2, B, Ck, Bk, D] into the running result: out [B·Rq, Bq, D], log-sum-exp [B·Rq, Bq].

    `dense` are the chunk's dense rows if a torch kernel computes them. `out_dtype` has at least 32 bits before the
    last chunk, and if dense rows merge into it. `lse`: True if it is needed for other chunks or backward.
    """
    batch = kv.shape[1]
    keys, values = kv.flatten(1, 2).unbind(0)
    is_first = running is None
    if dense is not None:
        lse = True
        if not is_first:
            out_dtype = torch.promote_types(rows.dtype, torch.float32)
    if dense is None or not dense.every:
        running = block_attention(
            rows,
            keys,
            values,
            **vars(table),
            scale=scale,
            kernel=kernel,
            partial=running,
            out_dtype=out_dtype,
            head_tokens=head_tokens,
            lse=lse,
            check=check,
        )
    if dense is not None:
        q, keys, values = (t.unflatten(0, (batch, -1)) for t in (rows, keys, values))
        running = _with_dense_rows(
            running, q, keys, values, parts=dense.parts, scale=scale, is_first=is_first, out_dtype=out_dtype
        )
    if running is None:
        raise ValueError("a chunk needs rows for the kernel or dense rows, got neither")
    return running


def _with_dense_rows(
    running: PartialAttention | None,
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    parts: tuple[DensePart, ...],
    scale: float,
    is_first: bool,
    out_dtype: torch.dtype,
) -> PartialAttention:
    """Adds the attention of dense rows of q [B, Rq, Bq, D] to keys and values [B, Ck, Bk, D] to the running result.

    In the first chunk results are written instead of merged, and `running` is None if all rows are dense.
    """
    # 1. A single part with all rows is the result
    if running is None and len(parts) == 1:
        out, lse = attend_dense_part(q, keys, values, parts[0], scale)
        return out.reshape(-1, *q.shape[2:]).to(out_dtype), lse.reshape(-1, q.shape[2])
    if running is None:
        lse = torch.empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32), device=q.device)
        running = torch.empty_like(q, dtype=out_dtype).flatten(0, 1), lse.flatten(0, 1)
    # 2. Write or merge each part in place
    all_out, all_lse = (t.unflatten(0, (len(q), -1)) for t in running)  # [B, Rq, Bq, D] and [B, Rq, Bq]
    for part in parts:
        out, lse = attend_dense_part(q, keys, values, part, scale)
        running_out, running_lse = part.rows_of(all_out), part.rows_of(all_lse)  # [B, heads, rows, Bq, D], views
        if is_first:
            running_out.copy_(out)
            running_lse.copy_(lse)
            continue
        for of_item in zip(running_out, running_lse, out, lse, strict=True):  # no view spans heads of two items
            merge_into(*of_item)
    return running
