"""The route of gradients: dispatch and combine are linear, so their backward is their tables read from right to left.

A rank packs what forward unpacked, and unpacks, adding, what forward packed: the keys and values of a split head went
to several ranks, whose gradients are added in the order of ranks, so that sums have the same bits every time.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from dbsp_core.comm.exchange import Exchange, Route, by_batch
from dbsp_core.comm.groups import PendingTransfer, SequenceGroup
from dbsp_kernels.exchange import CopySegments, copy_segments

__all__ = ["BackwardRoute"]

_REVERSED = [2, 3, 0, 1, 4]  # columns: to becomes from


@dataclass(frozen=True, eq=False)
class _BackwardExchange:
    """An exchange in the opposite direction.

    Attributes:
        exchange: Packs and sends what the forward exchange unpacked; unpacks nothing.
        unpack: For each tensor that the forward exchange sent, copies to be done one after another, none of which
            writes to a place twice.
    """

    exchange: Exchange
    unpack: tuple[tuple[CopySegments, ...], ...]

    @classmethod
    def of(cls, exchange: Exchange) -> _BackwardExchange:
        pack = tuple(_reversed(segments, segments.table.cpu().numpy()) for segments in exchange.unpack)
        unpack = tuple(_layers(segments) for segments in exchange.pack)
        return cls(Exchange(exchange.received, exchange.sent, pack, ()), unpack)

    def run(self, packed: tuple[torch.Tensor, ...], homes: tuple[torch.Tensor, ...], group: SequenceGroup) -> None:
        """Sends the gradients `packed` of what forward made, and adds them to `homes`; all [B, heads, places, D]."""
        self.add(self.exchange.run(self.exchange.send_buffer(*packed), group), homes)

    def start(self, packed: tuple[torch.Tensor, ...], group: SequenceGroup) -> PendingTransfer:
        """Starts what `run` does; what comes is for `add`."""
        buffer = self.exchange.send_buffer(*packed)
        return group.start_all_to_all(buffer, self.exchange.received, self.exchange.sent)

    def add(self, came: torch.Tensor, homes: tuple[torch.Tensor, ...]) -> None:
        for tensor, layers in zip(homes, self.unpack, strict=True):
            for segments in layers:
                copy_segments([by_batch(came)], tensor, [segments], add=True)


@dataclass(frozen=True, eq=False)
class BackwardRoute:
    """One rank's route for gradients; its fields reverse the exchanges of `Route`."""

    combine: _BackwardExchange
    dispatch: tuple[_BackwardExchange, ...]
    q_places: int
    fetch: tuple[_BackwardExchange, ...] = ()

    @classmethod
    def of(cls, route: Route) -> BackwardRoute:
        dispatch, fetch = (
            tuple(_BackwardExchange.of(exchange) for exchange in some)
            for some in (route.dispatch_exchanges, route.fetch_exchanges)
        )
        return cls(_BackwardExchange.of(route.combine_exchange), dispatch, route.q_places, fetch)

    def to_owners(self, dout: torch.Tensor, group: SequenceGroup) -> torch.Tensor:
        """Brings the output's gradient [B, H, n_local, D] to owners: [B, Rq·Bq, D], zero beyond short blocks."""
        packed = dout.new_zeros(dout.shape[0], self.q_places, dout.shape[3])
        self.combine.run((dout,), (packed[:, None],), group)
        return packed

    def gradients_at_home(self, shape: torch.Size, like: torch.Tensor) -> GradientsAtHome:
        """Zeros of q's shape [B, H, n_local, D], of the dtype and on the device of `like`."""
        return GradientsAtHome(self, like.new_zeros(shape), like.new_zeros(shape), like.new_zeros(shape))


@dataclass(eq=False)
class GradientsAtHome:
    """Gradients of one attention's q, k and v on their way home, [B, H, n_local, D] each.

    Those of a chunk of keys set off when its kernel is done, and are added when those of the next have set off: in the
    order of chunks, so that sums have the same bits every time.
    """

    route: BackwardRoute
    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor
    _coming: tuple[_BackwardExchange, PendingTransfer] | None = None

    def add_chunk(self, number: int, dkv: torch.Tensor, group: SequenceGroup) -> None:
        """Starts to return [2, B, Ck, Bk, D] of a chunk after the first. Collective."""
        exchange = self.route.fetch[number - 1]
        started = exchange, exchange.start((_packed(dkv),), group)
        self._settle()
        self._coming = started

    def finish(
        self, dq: torch.Tensor, dkv: torch.Tensor, group: SequenceGroup
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns dq [B, Rq·Bq, D] and the first chunk's dk and dv; then all gradients are complete. Collective."""
        packed_q, packed_kv = dq[:, None], _packed(dkv)
        first, *second = self.route.dispatch
        self._settle()
        if second:
            first.run((packed_q,), (self.dq,), group)
            second[0].run((packed_kv,), (self.dk, self.dv), group)
        else:
            first.run((packed_q, packed_kv), (self.dq, self.dk, self.dv), group)
        return self.dq, self.dk, self.dv

    def _settle(self) -> None:
        """Adds what is under way."""
        if self._coming is not None:
            exchange, pending = self._coming
            exchange.add(pending.wait(), (self.dk, self.dv))
            self._coming = None


def _packed(dkv: torch.Tensor) -> torch.Tensor:
    """[B, 2, Ck·Bk, D] of a chunk's gradients, [2, B, Ck, Bk, D]."""
    return dkv.flatten(2, 3).transpose(0, 1)


def _reversed(segments: CopySegments, table: np.ndarray) -> CopySegments:
    """The copies in rows of a segments' table, in the opposite direction and without filling in zeros."""
    columns = np.zeros_like(table)
    columns[:, :5] = table[:, _REVERSED]
    return CopySegments.of(columns, segments.table.device)


def _layers(segments: CopySegments) -> tuple[CopySegments, ...]:
    """Reverses segments and divides them so that none writes to a place twice: the n-th has each place's n-th reader.

    Readers of a place read the same segment, so places are equal where their first tokens are.
    """
    table = segments.table.cpu().numpy()
    _, place = np.unique(table[:, 0].astype(np.int64) << 32 | table[:, 1], return_inverse=True)
    order = np.argsort(place, kind="stable")
    first = np.searchsorted(place[order], np.arange(int(place.max(initial=-1)) + 1))
    reader = np.empty(len(table), dtype=np.int64)
    reader[order] = np.arange(len(table)) - first[place[order]]
    return tuple(_reversed(segments, table[reader == n]) for n in range(int(reader.max(initial=-1)) + 1))
