"""Dual-balanced attention with gradients: its forward, and its backward, which reads the same tables.

What is kept is at the owners: packed q, the first chunk of k and v, out and its log-sum-exp. Further chunks travel
again, from k and v outside attention, which are kept for it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from dbsp_core.comm.exchange import KeysAtHome
from dbsp_core.runtime.chunk_attention import PreparedAttention, forward
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
        rows, first, out, lse, *at_home = ctx.saved_tensors
        if ctx.check_gradient is not None:
            ctx.check_gradient(dout)
        route, group, wide = prepared.part.backward_route, prepared.group, lse.dtype
        keys = KeysAtHome(*at_home) if at_home else KeysAtHome(dout, dout)  # of which no further chunks come
        # 1. dOut to the owners of rows, as queries came to them.
        dout_rows = route.to_owners(dout, group).view(rows.shape)
        # 2. All chunks again: dQ is added up; dK and dV of each return beside the kernel on the next.
        call = _Call(prepared, ctx.kernel, rows, out, lse, dout_rows, ctx.scale)
        dq, dkv = torch.zeros_like(rows, dtype=wide), []
        home = route.gradients_at_home(ctx.shape, lse)
        for number, chunk in enumerate(prepared.part.route.chunks([first], keys, group)):
            dq_part, here = call.chunk(number, chunk)
            del chunk  # before another comes
            dq += dq_part
            if number == 0:
                dkv.append(here)
            else:
                home.add_chunk(number, here, group)
            del here
        # 3. dQ returns, and with it what came with queries, summed over the readers of each key.
        grads = home.finish(dq.view(ctx.shape[0], -1, ctx.shape[3]), dkv.pop(), group)
        return (*(grad.to(rows.dtype) if wide != rows.dtype else grad for grad in grads), None, None, None, None)


@dataclass(frozen=True, eq=False)
class _Call:
    """One attention at its owner.

    Attributes:
        rows, out, dout: [B·Rq, Bq, D].
        lse: [B·Rq, Bq], of all chunks together.
    """

    prepared: PreparedAttention
    kernel: Kernel
    rows: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor
    dout: torch.Tensor
    scale: float

    def chunk(self, number: int, kv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """One chunk's part of dq [B·Rq, Bq, D], and dk, dv of its keys and values [2, B, Ck, Bk, D].

        With the whole attention's log-sum-exp, chunks need no merging.
        """
        table, transposed = self.prepared.tables[number], self.prepared.part.transposed[number]
        keys, values = kv.flatten(1, 2).unbind(0)
        expanded, batch = table.expanded(kv.shape[1]), kv.shape[1]
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
        return dq, torch.stack([dk, dv]).view(kv.shape)
