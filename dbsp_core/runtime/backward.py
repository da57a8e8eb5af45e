"""The backward of one attention on one rank, with the tables of its forward, and its exchanges.

Gradients of the output go to the owners of rows, gradients of q, k and v back to their source ranks. Dispatch and
combine are linear, so their backward is `Exchange.backward`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from dbsp_core.comm.exchange import Exchange, LocalKeys, Route
from dbsp_core.comm.groups import PendingTransfer, SequenceGroup
from dbsp_core.runtime.prepared import PreparedAttention
from dbsp_kernels import BackwardInputs, Kernel, KernelInputs, block_attention_backward


def attention_backward(
    prepared: PreparedAttention, saved: Sequence[torch.Tensor], dout: torch.Tensor, scale: float, kernel: Kernel
) -> tuple[torch.Tensor, ...]:
    """Computes the gradients of q, k and v, [B, H, n_local, D] each. Collective.

    `saved` has rows [B·Rq, Bq, D], the first chunk [2, B, Ck, Bk, D], the rows' output and log-sum-exp [B·Rq, Bq];
    with more chunks also k and v [B, H, n_local, D].
    """
    rows, first, out, lse, *local_kv = saved
    route, group, wide = prepared.route, prepared.group, lse.dtype
    k, v = local_kv or (dout, dout)  # dout is a placeholder if there are no later chunks
    # 1. Send dOut to the owners of rows, like queries: [B, H, n_local, D] → [B, Rq·Bq, D], zero beyond blocks
    packed_dout = dout.new_zeros(dout.shape[0], route.q_slots, dout.shape[3])
    _exchange(route.combine_exchange.backward, (dout,), (packed_dout[:, None],), group)
    dout_rows = packed_dout.view(rows.shape)
    # 2. For all chunks again: accumulate dQ; send dK and dV back while the kernel runs on the next chunk
    slots = kernel.slots and kernel.slots(rows, (prepared.plan.grid.block_q, prepared.plan.grid.block_k))
    tables = prepared.tables.expanded(len(dout), slots)

    def of_chunk(number: int, kv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns one chunk's contribution to dq [B·Rq, Bq, D], and its dk and dv [2, B, Ck, Bk, D].

        Uses the whole attention's log-sum-exp, so contributions just add up.
        """
        bits, transposed = prepared.tables.bits[number], prepared.table_layout.transposed[number]
        keys, values = kv.flatten(1, 2).unbind(0)
        forward = KernelInputs(rows, keys, values, **vars(tables[number]), scale=scale)
        turned = partial(transposed.table, bits, kv.shape[1], slots)
        dq, dk, dv = block_attention_backward(BackwardInputs(forward, dout_rows, out, lse, turned), kernel)
        return dq, torch.stack([dk, dv]).view(kv.shape)

    dq, dkv = torch.zeros_like(rows, dtype=wide), []
    gradients = LocalGradients.zeros(route, group, dout.shape, lse)
    for number, chunk in enumerate(route.chunks([first], LocalKeys(k, v), group)):
        dq_part, here = of_chunk(number, chunk)
        del chunk  # free before the next arrives
        dq += dq_part
        if number == 0:
            dkv.append(here)
        else:
            gradients.add_chunk(number, here)
        del here
    # 3. Send back dQ and the first chunk's dK and dV, summed over the readers of each key
    grads = gradients.finish(dq.view(len(dout), -1, dout.shape[3]), dkv.pop())
    return tuple(grad.to(rows.dtype) for grad in grads)


@dataclass(eq=False)
class LocalGradients:
    """Gradients of q, k and v at their source ranks, [B, H, n_local, D] each.

    A chunk's gradients are sent after its kernel and added after those of the next chunk are sent. The order of chunks
    is fixed, so sums are bitwise deterministic.
    """

    route: Route
    group: SequenceGroup
    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor
    _coming: tuple[Exchange, PendingTransfer] | None = None

    @classmethod
    def zeros(cls, route: Route, group: SequenceGroup, shape: torch.Size, like: torch.Tensor) -> LocalGradients:
        """Makes zeros of q's shape [B, H, n_local, D], with dtype and device of `like`."""
        return cls(route, group, like.new_zeros(shape), like.new_zeros(shape), like.new_zeros(shape))

    def add_chunk(self, number: int, dkv: torch.Tensor) -> None:
        """Starts sending back gradients [2, B, Ck, Bk, D] of a chunk after the first. Collective."""
        exchange = self.route.fetch_exchanges[number - 1].backward
        started = exchange, exchange.start(exchange.send_buffer(_packed(dkv)), self.group)
        self._settle()
        self._coming = started

    def finish(self, dq: torch.Tensor, dkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Sends back dq [B, Rq·Bq, D] and the first chunk's dk and dv; returns the complete gradients. Collective."""
        self._settle()
        packed, local = (dq[:, None], _packed(dkv)), (self.dq, self.dk, self.dv)
        first, *second = (exchange.backward for exchange in self.route.dispatch_exchanges)
        if second:
            _exchange(first, packed[1:], local[1:], self.group)
            _exchange(second[0], packed[:1], local[:1], self.group)
        else:
            _exchange(first, packed, local, self.group)
        return local

    def _settle(self) -> None:
        """Adds the gradients in flight."""
        if self._coming is not None:
            exchange, pending = self._coming
            exchange.deliver(pending.wait(), self.dk, self.dv)
            self._coming = None


def _exchange(
    exchange: Exchange, packed: tuple[torch.Tensor, ...], local: tuple[torch.Tensor, ...], group: SequenceGroup
) -> None:
    """Exchanges gradients and adds the received ones to `local`; all [B, heads, slots, D]. Collective."""
    exchange.deliver(exchange.start(exchange.send_buffer(*packed), group).wait(), *local)


def _packed(dkv: torch.Tensor) -> torch.Tensor:
    """Reshapes a chunk's gradients [2, B, Ck, Bk, D] → [B, 2, Ck·Bk, D]."""
    return dkv.flatten(2, 3).transpose(0, 1)
