"""Exchange of gradients: of the output to the owners of rows, and of q, k and v back to their source ranks.

Dispatch and combine are linear, so their backward is `Exchange.backward`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dbsp_core.comm.exchange import Exchange, Route
from dbsp_core.comm.groups import PendingTransfer, SequenceGroup


def gradient_to_owners(route: Route, dout: torch.Tensor, group: SequenceGroup) -> torch.Tensor:
    """Sends the output's gradient [B, H, n_local, D] to owners → [B, Rq·Bq, D], zero beyond blocks. Collective."""
    packed = dout.new_zeros(dout.shape[0], route.q_slots, dout.shape[3])
    _exchange(route.combine_exchange.backward, (dout,), (packed[:, None],), group)
    return packed


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
