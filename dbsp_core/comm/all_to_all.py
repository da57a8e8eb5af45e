"""The uneven all-to-all that takes (head, block) pieces from the ranks that hold them to their owners, and back.

Each piece goes straight from holder to owner, q, k and v packed into one exchange (or q apart, where memory asks for
it, see `exchange_q_separately`; or needed keys of other ring rows in further ones, that attention to the first hides);
what does not change rank does not travel. An exchange is tables of segments, made
from blocks and shards: one pass over memory packs what is sent, straight from the host's own strides, and one unpacks
what came, straight into what the kernel reads.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch

from dbsp_core.comm.groups import PendingTransfer, SequenceGroup
from dbsp_core.planning.assignment import Assignment
from dbsp_kernels.packing.segment_copy import CopySegments, copy_segments

__all__ = ["Exchange", "PendingKeys", "Route", "by_batch", "exchange_q_separately"]

UNEVEN = 1.05
"""Rows of the rank that has most over their mean, from which on memory counts more than one more exchange."""


@dataclass(frozen=True, eq=False, repr=False)
class Exchange:
    """One rank's side of an all-to-all of uneven parts.

    sent, received: tokens by destination and by source
    pack:   for each tensor that is sent, from its places to the send buffer, in which each destination's tokens of the
            tensors follow one another
    unpack: for each tensor that is made of what came, from the receive buffer to its places
    """

    sent: tuple[int, ...]
    received: tuple[int, ...]
    pack: tuple[CopySegments, ...]
    unpack: tuple[CopySegments, ...]

    def to(self, device: torch.device) -> Exchange:
        """The same with its tables on a device."""
        return replace(self, pack=_moved(self.pack, device), unpack=_moved(self.unpack, device))

    def send_buffer(self, *tensors: torch.Tensor) -> torch.Tensor:
        """[tokens sent, B, D], packed from tensors [B, heads, n, D] of any strides."""
        first = tensors[0]
        buffer = first.new_empty(sum(self.sent), first.shape[0], first.shape[3])
        for tensor, segments in zip(tensors, self.pack, strict=True):
            copy_segments(tensor, by_batch(buffer), segments)
        return buffer

    def run(self, buffer: torch.Tensor, group: SequenceGroup) -> torch.Tensor:
        """[tokens received, B, D], for what was packed into a send buffer."""
        return group.all_to_all(buffer, self.received, self.sent)


@dataclass(frozen=True)
class PendingKeys:
    """Keys and values in flight; `wait` unpacks them: [2, B, Ck, Bk, D], zero beyond short blocks."""

    transfer: PendingTransfer
    unpack: CopySegments
    blocks: int
    block_k: int

    def wait(self) -> torch.Tensor:
        came = by_batch(self.transfer.wait())
        packed = came.new_empty(2, len(came), self.blocks * self.block_k, came.shape[-1])
        copy_segments(came, packed.transpose(0, 1), self.unpack)
        return packed.view(2, len(came), self.blocks, self.block_k, came.shape[-1])


@dataclass(frozen=True, eq=False, repr=False)
class Route:
    """How one rank's tensors travel between the layout outside attention and the owners of rows.

    dispatch_exchanges: one of q, k and v; or one of q, and then one of k and v
    combine_exchange:   of the output, on its way back
    q_places, kv_places: Rq·Bq and Ck·Bk, tokens with the places beyond short blocks
    block_k: tokens of a KV block
    fetch_exchanges:    of k and v, where those of later periods come from home too; `fetched_blocks` in each
    at_once:            whether all of them set off together, and not each when the one before it has come
    """

    dispatch_exchanges: tuple[Exchange, ...]
    combine_exchange: Exchange
    q_places: int
    kv_places: int
    block_k: int
    fetch_exchanges: tuple[Exchange, ...] = ()
    fetched_blocks: tuple[int, ...] = ()
    at_once: bool = False

    def to(self, device: torch.device) -> Route:
        """The same with its tables on a device."""
        there, fetch = (
            tuple(exchange.to(device) for exchange in some) for some in (self.dispatch_exchanges, self.fetch_exchanges)
        )
        return replace(
            self, dispatch_exchanges=there, combine_exchange=self.combine_exchange.to(device), fetch_exchanges=fetch
        )

    @property
    def key_exchanges(self) -> tuple[Exchange, ...]:
        """Those that take q, k and v to owners: `dispatch_exchanges` and `fetch_exchanges`."""
        return (*self.dispatch_exchanges, *self.fetch_exchanges)

    def tokens_sent(self, rank: int) -> tuple[int, int]:
        """How many tokens of one head `rank`, whose route this is, sends to others: in dispatch, and in combine."""
        dispatch, combine = (
            sum(sum(one.sent) - one.sent[rank] for one in exchanges)
            for exchanges in (self.key_exchanges, (self.combine_exchange,))
        )
        return dispatch, combine

    def dispatch(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, group: SequenceGroup
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """q, k, v: [B, H, n_local, D] outside attention, of any strides.

        returns: packed q [B, Rq·Bq, D] and packed k, v together [2, B, Ck·Bk, D], zero beyond short blocks
        """
        batch, _, _, width = q.shape
        first, *second = self.dispatch_exchanges
        came = first.run(first.send_buffer(*((q,) if second else (q, k, v))), group)
        packed_q = q.new_empty(batch, self.q_places, width)
        copy_segments(by_batch(came), packed_q[:, None], first.unpack[0])
        if second:
            del came
            came = second[0].run(second[0].send_buffer(k, v), group)
        packed_kv = q.new_empty(2, batch, self.kv_places, width)
        copy_segments(by_batch(came), packed_kv.transpose(0, 1), self.dispatch_exchanges[-1].unpack[-1])
        return packed_q, packed_kv

    def fetch(self, k: torch.Tensor, v: torch.Tensor, group: SequenceGroup) -> Iterator[PendingKeys]:
        """The keys of later periods, in flight: all from the first on, or each from when it is asked for.

        k, v: [B, H, n_local, D], outside attention
        """

        def start(exchange: Exchange, blocks: int) -> PendingKeys:
            transfer = group.start_all_to_all(exchange.send_buffer(k, v), exchange.received, exchange.sent)
            return PendingKeys(transfer, exchange.unpack[0], blocks, self.block_k)

        started: Iterator[PendingKeys] = map(start, self.fetch_exchanges, self.fetched_blocks)
        if not self.at_once:
            yield from started
            return
        in_flight = deque(started)
        while in_flight:  # what has come is not held here
            yield in_flight.popleft()

    def combine(self, out: torch.Tensor, like: torch.Tensor, group: SequenceGroup) -> torch.Tensor:
        """The way back. out: packed [B, Rq·Bq, D]; returns: [B, H, n_local, D], strided as `like`, zero at padding."""
        buffer = self.combine_exchange.send_buffer(out[:, None])
        del out  # before what comes is allocated
        came = self.combine_exchange.run(buffer, group)
        del buffer
        local = torch.empty_like(like, dtype=came.dtype)
        copy_segments(by_batch(came), local, self.combine_exchange.unpack[0])
        return local


def _moved(segments: tuple[CopySegments, ...], device: torch.device) -> tuple[CopySegments, ...]:
    return tuple(one if one.table.device.type == device.type == "cpu" else one.to(device) for one in segments)


def by_batch(buffer: torch.Tensor) -> torch.Tensor:
    """A buffer [tokens, B, D] as the one head [B, 1, tokens, D] that it is to segments."""
    return buffer.transpose(0, 1)[:, None]


def exchange_q_separately(assignment: Assignment) -> bool:
    """Whether queries have an exchange of their own, before that of keys and values.

    With Ulysses only, memory is fullest when q, k and v are at their owner twice, as they came and as the kernel reads
    them. Where a rank has many more rows than most, because they are sparse, that would be more than plain Ulysses
    takes, so that queries are unpacked first. Rings are fullest later.
    """
    world = assignment.strategy.world
    if assignment.strategy.ring > 1 or world == 1:
        return False
    rows = np.bincount(assignment.q_owner.ravel(), minlength=world)
    return bool(rows.max() * world > UNEVEN * assignment.q_owner.size)
