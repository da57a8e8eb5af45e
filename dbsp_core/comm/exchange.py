"""The all-to-all exchanges between the ranks that hold tokens and the owners of their rows, forward and backward."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from typing import NamedTuple

import numpy as np
import torch

from dbsp_core.comm.groups import PendingTransfer, SequenceGroup
from dbsp_core.planning.comm_dtype import INT8, MODEL, CommDtype
from dbsp_kernels.exchange import copy_segments, copy_to_both, rotate_segments, row_words
from dbsp_kernels.segments import CopySegments

CHUNKS_IN_FLIGHT = 2
"""Chunks of keys and values that a rank holds or receives at a time: the current one and the next."""


@dataclass(frozen=True, eq=False, repr=False)
class Exchange:
    """One rank's side of an all-to-all with unequal splits."""

    sent: tuple[int, ...]  # Number of tokens to each rank
    received: tuple[int, ...]  # Number of tokens from each rank
    # Per input tensor, segments to copy to the send buffer, which is ordered by destination
    pack: tuple[CopySegments, ...]
    # Per output tensor, segments to copy from the receive buffer, one after another; no copy writes to a slot twice
    unpack: tuple[tuple[CopySegments, ...], ...]
    comm_dtype: CommDtype = MODEL  # Communication dtype of the buffers
    adds: bool = False  # True if unpacking adds to the output tensors
    # True if, for batch 1, the receive buffer already has the layout of keys and values that the kernel reads
    in_order: bool = False
    # True if this exchange returns the output, which is rotated back if values were rotated for int8
    returns: bool = False

    @cached_property
    def backward(self) -> Exchange:
        """The exchange of gradients, with the same tables reversed; made at first use.

        Gradients of a slot that several ranks read are added in order of ranks, so sums are bitwise deterministic.
        """
        pack = tuple(_reversed(segments, segments.table.cpu().numpy()) for (segments,) in self.unpack)
        return Exchange(self.received, self.sent, pack, tuple(map(_readers, self.pack)), adds=True)

    def to(self, device: torch.device) -> Exchange:
        """Returns a copy with tables on a device."""
        unpack = tuple(_on_device(copies, device) for copies in self.unpack)
        return replace(self, pack=_on_device(self.pack, device), unpack=unpack)

    def send_buffer(self, *tensors: torch.Tensor, less: Sequence[torch.Tensor | None] = ()) -> torch.Tensor:
        """Packs tensors [B, heads, n, D] of any strides into a new buffer [tokens sent, B, W].

        `less` has for each tensor float32[B, heads, D] to subtract from its tokens (int8 only), or None; () for none.
        """
        first, slots, batch = tensors[0], sum(self.sent), tensors[0].shape[0]
        if (self.comm_dtype.out if self.returns else self.comm_dtype.qkv) == INT8:
            buffer = first.new_empty(slots, batch, row_words(first.shape[-1]), dtype=torch.int32)
            self.comm_dtype.write(tensors, buffer, self.pack, less, rotate=not self.returns)
            return buffer
        buffer = first.new_empty(slots, batch, first.shape[-1])
        copy_segments(tensors, buffer, self.pack)
        return buffer

    def start(self, buffer: torch.Tensor, group: SequenceGroup) -> PendingTransfer:
        """Starts the exchange of a send buffer; the result is [tokens received, B, W]. Collective."""
        return group.start_all_to_all(buffer, self.received, self.sent)

    def deliver(self, came: torch.Tensor, *tensors: torch.Tensor) -> None:
        """Unpacks a receive buffer into output tensors [B, heads, slots, W]."""
        if self.returns and self.comm_dtype.is_int8:
            rotate_segments(came, tensors[0], self.unpack[0][0])
            return
        if len(tensors) == 2 and not self.adds:
            copy_to_both(came, tensors, [segments for (segments,) in self.unpack])
            return
        for tensor, copies in zip(tensors, self.unpack, strict=True):
            for segments in copies:
                copy_segments([came], tensor, [segments], add=self.adds)


class LocalKeys(NamedTuple):
    """A rank's keys and values [B, H, n_local, D] outside attention, any strides."""

    k: torch.Tensor
    v: torch.Tensor
    # For keys and for values, float32[B, H, D] to subtract before sending (equal on all ranks) or None; () for none
    less: tuple[torch.Tensor | None, ...] = ()


@dataclass(frozen=True, eq=False, repr=False)
class Dispatch:
    """q [B, H, n_local, D], keys and values of one attention in flight to the owners of rows."""

    q: torch.Tensor
    keys: LocalKeys
    coming: list[PendingTransfer]  # one element, removed on arrival to free the buffers


@dataclass(frozen=True, eq=False, repr=False)
class Route:
    """One rank's exchanges: tensors from source ranks to owners of rows, and the output back."""

    dispatch_exchanges: tuple[Exchange, ...]  # One for q, k and v; or one for k and v, then one for q
    combine_exchange: Exchange
    q_slots: int  # Rq·Bq, including padding of short blocks; kv_slots: Ck·Bk, likewise
    kv_slots: int
    block_k: int
    # For k and v of each chunk after the first, with `fetched_blocks` blocks each
    fetch_exchanges: tuple[Exchange, ...] = ()
    fetched_blocks: tuple[int, ...] = ()
    # Per fetch exchange, True if this rank sends the same keys as before, reusing the send buffer
    packed_again: tuple[bool, ...] = ()

    def to(self, device: torch.device) -> Route:
        """Returns a copy with tables on a device."""
        return replace(
            self,
            dispatch_exchanges=tuple(exchange.to(device) for exchange in self.dispatch_exchanges),
            combine_exchange=self.combine_exchange.to(device),
            fetch_exchanges=tuple(exchange.to(device) for exchange in self.fetch_exchanges),
        )

    def tokens_sent(self, rank: int) -> tuple[int, int, int]:
        """Returns the tokens of one head that `rank` sends to others: dispatched, in chunks, combined."""
        stages = self.dispatch_exchanges, self.fetch_exchanges, (self.combine_exchange,)
        dispatched, fetched, combined = (sum(sum(e.sent) - e.sent[rank] for e in stage) for stage in stages)
        return dispatched, fetched, combined

    def start(self, q: torch.Tensor, keys: LocalKeys, group: SequenceGroup) -> Dispatch:
        """Starts sending q [B, H, n_local, D] (any strides), keys and values to the owners of rows. Collective.

        Queries exchanged separately are sent later, in `arrive`.
        """
        first, *second = self.dispatch_exchanges
        if second:
            buffer = first.send_buffer(keys.k, keys.v, less=keys.less)
        else:
            buffer = first.send_buffer(q, keys.k, keys.v, less=(None, *keys.less) if keys.less else ())
        return Dispatch(q, keys, [first.start(buffer, group)])

    def arrive(self, dispatch: Dispatch, group: SequenceGroup) -> tuple[torch.Tensor, torch.Tensor]:
        """Waits for the tensors that `start` sent. Collective.

        Returns packed q [B, 1, Rq·Bq, W] and the first chunk of k and v [2, B, Ck, Bk, W], in the communication dtype;
        zero beyond short blocks.
        """
        (first, *second), q = self.dispatch_exchanges, dispatch.q
        came, blocks = dispatch.coming.pop().wait(), self.kv_slots // self.block_k
        if second:
            chunk = self._arrived(came, first, blocks)
            del came  # free before queries arrive
            came = second[0].start(second[0].send_buffer(q), group).wait()
        packed_q = came.new_empty(len(q), 1, self.q_slots, came.shape[-1])
        if second:
            second[0].deliver(came, packed_q)
            return packed_q, chunk
        packed_kv = came.new_empty(2, len(q), self.kv_slots, came.shape[-1])
        first.deliver(came, packed_q, packed_kv.transpose(0, 1))
        return packed_q, packed_kv.view(2, len(q), blocks, self.block_k, came.shape[-1])

    def chunks(self, first: list[torch.Tensor], keys: LocalKeys, group: SequenceGroup) -> Iterator[torch.Tensor]:
        """Yields chunks of keys and values [2, B, Ck, Bk, W] in the communication dtype. Collective.

        `CHUNKS_IN_FLIGHT` chunks are held or in flight: release a chunk before asking for the next. Removes the first
        chunk from the list `first`.
        """
        to_come = zip(self.fetch_exchanges, self.fetched_blocks, self.packed_again, strict=True)
        coming: deque[tuple[PendingTransfer, Exchange, int]] = deque()
        buffer = None
        while first:
            for exchange, blocks, again in islice(to_come, CHUNKS_IN_FLIGHT - 1 - len(coming)):
                if buffer is None or not again:
                    buffer = exchange.send_buffer(keys.k, keys.v, less=keys.less)
                coming.append((exchange.start(buffer, group), exchange, blocks))
            yield first.pop()  # pop, so that the caller can free it
            if coming:
                transfer, exchange, blocks = coming.popleft()
                first.append(self._arrived(transfer.wait(), exchange, blocks))
                del transfer

    def _arrived(self, came: torch.Tensor, exchange: Exchange, blocks: int) -> torch.Tensor:
        """Unpacks a fetched chunk → [2, B, Ck, Bk, W], zero beyond short blocks."""
        _, batch, head_dim = came.shape
        if exchange.in_order and batch == 1:
            return came.view(2, batch, blocks, self.block_k, head_dim)
        packed = came.new_empty(2, batch, blocks * self.block_k, head_dim)
        exchange.deliver(came, packed.transpose(0, 1))
        return packed.view(2, batch, blocks, self.block_k, head_dim)

    def combine(self, out: torch.Tensor, like: torch.Tensor, group: SequenceGroup) -> torch.Tensor:
        """Sends the packed output [B, 1, Rq·Bq, D] back → [B, H, n_local, D], strided like `like`, zero at padding."""
        buffer = self.combine_exchange.send_buffer(out)
        del out  # free before allocating the receive buffer
        came = self.combine_exchange.start(buffer, group).wait()
        del buffer
        local = torch.empty_like(like)
        self.combine_exchange.deliver(came, local)
        return local


def _on_device(segments: tuple[CopySegments, ...], device: torch.device) -> tuple[CopySegments, ...]:
    return tuple(
        segment if segment.table.device.type == device.type == "cpu" else segment.to(device) for segment in segments
    )


def _reversed(segments: CopySegments, table: np.ndarray) -> CopySegments:
    """Returns the segments of a table's rows in the opposite direction, without zeros."""
    columns = np.zeros_like(table)
    columns[:, :5] = table[:, [2, 3, 0, 1, 4]]  # to becomes from
    return CopySegments.from_columns(columns, segments.table.device)


def _readers(segments: CopySegments) -> tuple[CopySegments, ...]:
    """Reverses segments, split so that none writes to a slot twice: the n-th has each slot's n-th reader.

    Readers of a slot read the same segment, so comparing first tokens is enough.
    """
    table = segments.table.cpu().numpy()
    _, target = np.unique(table[:, 0].astype(np.int64) << 32 | table[:, 1], return_inverse=True)
    order = np.argsort(target, kind="stable")
    first = np.searchsorted(target[order], np.arange(int(target.max(initial=-1)) + 1))
    reader = np.empty(len(table), dtype=np.int64)
    reader[order] = np.arange(len(table)) - first[target[order]]
    return tuple(_reversed(segments, table[reader == n]) for n in range(int(reader.max(initial=-1)) + 1))
