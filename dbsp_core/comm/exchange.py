"""Exchanges between the ranks that hold tokens and the ranks that compute their rows, forward and backward."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from typing import NamedTuple

import numpy as np
import torch

from dbsp_core.comm.groups import PendingTransfer, SequenceGroup
from dbsp_core.layout.sequence_layout import SequenceLayout
from dbsp_core.planning.comm_dtype import INT8, MODEL, CommDtype
from dbsp_core.planning.plan import Plan
from dbsp_kernels.exchange import copy_segments, copy_to_both, rotate_segments, row_words
from dbsp_kernels.prediction import sum_tokens
from dbsp_kernels.rounding import MEAN_UNIT
from dbsp_kernels.segments import CopySegments, to_device

BLOCK = 256
"""Tokens that are summed at a time, so that a GPU has work for all of its multiprocessors."""


def mean_of_tokens(tokens: torch.Tensor, layout: SequenceLayout, group: SequenceGroup) -> torch.Tensor:
    """Returns float32[B, H, D], the mean over all tokens of a layout, from a rank's [B, H, n_local, D]. Collective.

    Padding does not count. Sums are of integers: no order, and no number of ranks, changes them. What is not finite,
    and magnitudes beyond 2^15, count as `sum_tokens` has them.
    """
    local_tokens = _own_tokens(layout, group.rank, tokens.device)
    head_dim = tokens.shape[-1]
    sums = sum_tokens(tokens, *local_tokens)[..., :head_dim].sum(dim=2)  # [H, B, D]
    gathered = group.all_gather_along(sums[None].contiguous()).sum(dim=0)
    mean = gathered.to(torch.float64) * (MEAN_UNIT / layout.tokens)
    return mean.to(torch.float32).transpose(0, 1).contiguous()


def mean_bytes(batch: int, heads: int, head_dim: int, ranks: int) -> int:
    """Bytes that a rank sends to others for one mean."""
    return 8 * batch * heads * head_dim * (ranks - 1)


@functools.lru_cache(maxsize=8)  # the same at every attention of a video size
def _own_tokens(layout: SequenceLayout, rank: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the rank's slots with a token, in blocks: `position` and `first` of `sum_tokens`."""
    target = layout.tokens_at(rank)[1]
    first = np.append(np.arange(0, len(target), BLOCK), len(target))
    return to_device(target, device), to_device(first, device)


CHUNKS_IN_FLIGHT = 2
"""Chunks of keys and values that a rank holds or awaits at a time: the one that its kernel reads, and the next."""

IMBALANCED = 1.05
"""Most rows of a rank over the mean. Above it, saving memory is worth an exchange more."""


@dataclass(frozen=True, eq=False, repr=False)
class Exchange:
    """One rank's side of an all-to-all with different amounts per rank.

    Attributes:
        sent: Tokens by destination.
        received: Tokens by source.
        pack: By input tensor, copies to the send buffer, in which the tokens for one destination are together.
        unpack: By output tensor, copies from the receive buffer, which run one after another; none of them writes to a
            slot twice. Output tensors are written as the buffer is.
        comm_dtype: Communication dtype of the tokens in the buffers.
        adds: True if unpacking adds to output tensors.
        in_order: True if the receive buffer of one item has keys and values as the kernel reads them.
        returns: True if the output is sent, and rotated back where int8 values have rotated it.
    """

    sent: tuple[int, ...]
    received: tuple[int, ...]
    pack: tuple[CopySegments, ...]
    unpack: tuple[tuple[CopySegments, ...], ...]
    comm_dtype: CommDtype = MODEL
    adds: bool = False
    in_order: bool = False
    returns: bool = False

    @cached_property
    def backward(self) -> Exchange:
        """The exchange of gradients: the same tables, read in the other direction. Made at the first use.

        A rank packs what it unpacked, and unpacks, adding, what it packed: a slot that several ranks read gets their
        gradients in the order of ranks, so that sums are bitwise identical every time.
        """
        pack = tuple(_reversed(segments, segments.table.cpu().numpy()) for (segments,) in self.unpack)
        return Exchange(self.received, self.sent, pack, tuple(map(_readers, self.pack)), adds=True)

    def to(self, device: torch.device) -> Exchange:
        """Returns a copy with its tables on a device."""
        unpack = tuple(_on_device(copies, device) for copies in self.unpack)
        return replace(self, pack=_on_device(self.pack, device), unpack=unpack)

    def to_others(self, rank: int) -> int:
        """Returns the tokens that `rank`, whose side this is, sends to others."""
        return sum(self.sent) - self.sent[rank]

    def send_buffer(self, *tensors: torch.Tensor, less: Sequence[torch.Tensor | None] = ()) -> torch.Tensor:
        """Returns [tokens sent, B, W], written from tensors [B, heads, n, D] of any strides.

        `less` has for each tensor float32[B, heads, D] to be subtracted from all of its tokens, or None; () for none.
        """
        first, slots, batch = tensors[0], sum(self.sent), tensors[0].shape[0]
        if (self.comm_dtype.out if self.returns else self.comm_dtype.qkv) == INT8:
            buffer = first.new_empty(slots, batch, row_words(first.shape[-1]), dtype=torch.int32)
            self.comm_dtype.write(tensors, buffer, self.pack, less, rotate=not self.returns)
            return buffer
        if less:
            raise ValueError("tokens in the model's precision are sent as they are")
        buffer = first.new_empty(slots, batch, first.shape[-1])
        copy_segments(tensors, buffer, self.pack)
        return buffer

    def run(self, buffer: torch.Tensor, group: SequenceGroup) -> torch.Tensor:
        """Exchanges a send buffer for [tokens received, B, W]. Collective."""
        return group.all_to_all(buffer, self.received, self.sent)

    def start(self, buffer: torch.Tensor, group: SequenceGroup) -> PendingTransfer:
        """Starts what `run` does. Collective."""
        return group.start_all_to_all(buffer, self.received, self.sent)

    def deliver(self, came: torch.Tensor, *tensors: torch.Tensor) -> None:
        """Unpacks what was received into output tensors [B, heads, slots, W]."""
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
    """A rank's keys and values, [B, H, n_local, D] of any strides, outside attention.

    Attributes:
        mean: float32[B, H, D], what is subtracted from keys before they are sent, equal on all ranks, or None.
    """

    k: torch.Tensor
    v: torch.Tensor
    mean: torch.Tensor | None = None

    @property
    def less(self) -> tuple[torch.Tensor | None, ...]:
        """Tensors to subtract from keys and from values; () for nothing."""
        return () if self.mean is None else (self.mean, None)


@dataclass(frozen=True, eq=False, repr=False)
class Route:
    """The exchanges that take one rank's tensors from their source ranks to the owners of rows, and the output back.

    Attributes:
        dispatch_exchanges: One for q, k and v; or one for q, then one for k and v.
        q_slots: Rq·Bq, tokens and the padding of short blocks; kv_slots, Ck·Bk, likewise.
        fetch_exchanges: For the k and v of chunks after the first; each brings so many `fetched_blocks`.
        packed_identically: True if this rank sends the same keys in each of them, from one send buffer.
    """

    dispatch_exchanges: tuple[Exchange, ...]
    combine_exchange: Exchange
    q_slots: int
    kv_slots: int
    block_k: int
    fetch_exchanges: tuple[Exchange, ...] = ()
    fetched_blocks: tuple[int, ...] = ()
    packed_identically: bool = False

    def to(self, device: torch.device) -> Route:
        """Returns a copy with its tables on a device."""
        return replace(
            self,
            dispatch_exchanges=tuple(exchange.to(device) for exchange in self.dispatch_exchanges),
            combine_exchange=self.combine_exchange.to(device),
            fetch_exchanges=tuple(exchange.to(device) for exchange in self.fetch_exchanges),
        )

    def tokens_sent(self, rank: int) -> tuple[int, int, int]:
        """Returns the tokens of one head that `rank` sends to others: dispatched, in chunks, combined."""
        stages = self.dispatch_exchanges, self.fetch_exchanges, (self.combine_exchange,)
        dispatched, fetched, combined = (sum(exchange.to_others(rank) for exchange in stage) for stage in stages)
        return dispatched, fetched, combined

    def dispatch(self, q: torch.Tensor, keys: LocalKeys, group: SequenceGroup) -> tuple[torch.Tensor, torch.Tensor]:
        """Brings q [B, H, n_local, D] of any strides, and keys and values, to their owners. Collective.

        Returns:
            Packed q [B, 1, Rq·Bq, W], and the first chunk of k and v [2, B, Ck, Bk, W], as they are written on the
            way; zero beyond short blocks.
        """
        (k, v, _), (first, *second), batch = keys, self.dispatch_exchanges, q.shape[0]
        if second:
            came = first.run(first.send_buffer(q), group)
        else:
            came = first.run(first.send_buffer(q, k, v, less=(None, *keys.less) if keys.less else ()), group)
        packed_q = came.new_empty(batch, 1, self.q_slots, came.shape[-1])
        if second:
            first.deliver(came, packed_q)
            del came  # before keys and values are exchanged
            came = second[0].run(second[0].send_buffer(k, v, less=keys.less), group)
        packed_kv = came.new_empty(2, batch, self.kv_slots, came.shape[-1])
        if second:
            second[0].deliver(came, packed_kv.transpose(0, 1))
        else:
            first.deliver(came, packed_q, packed_kv.transpose(0, 1))
        return packed_q, packed_kv.view(2, batch, -1, self.block_k, came.shape[-1])

    def chunks(self, first: list[torch.Tensor], keys: LocalKeys, group: SequenceGroup) -> Iterator[torch.Tensor]:
        """Yields chunks of keys and values [2, B, Ck, Bk, W], as they are written on the way. Collective.

        A rank holds or awaits `CHUNKS_IN_FLIGHT` of them: one that was yielded is to be released before the next one
        is asked for.

        Args:
            first: The first chunk, which is taken out of the list.
            keys: All ranks' k and v.
        """
        to_come = zip(self.fetch_exchanges, self.fetched_blocks, strict=True)
        coming: deque[tuple[PendingTransfer, Exchange, int]] = deque()
        buffer = None
        while first:
            for exchange, blocks in islice(to_come, CHUNKS_IN_FLIGHT - 1 - len(coming)):
                if buffer is None or not self.packed_identically:
                    buffer = exchange.send_buffer(keys.k, keys.v, less=keys.less)
                coming.append((exchange.start(buffer, group), exchange, blocks))
            yield first.pop()  # popped: what has been yielded is not kept alive here
            if coming:
                first.append(self._arrived(*coming.popleft()))

    def _arrived(self, transfer: PendingTransfer, exchange: Exchange, blocks: int) -> torch.Tensor:
        """Waits for a chunk, and returns it as [2, B, Ck, Bk, W], zero beyond short blocks."""
        came = transfer.wait()
        _, batch, head_dim = came.shape
        if exchange.in_order and batch == 1:
            return came.view(2, batch, blocks, self.block_k, head_dim)
        packed = came.new_empty(2, batch, blocks * self.block_k, head_dim)
        exchange.deliver(came, packed.transpose(0, 1))
        return packed.view(2, batch, blocks, self.block_k, head_dim)

    def combine(self, out: torch.Tensor, like: torch.Tensor, group: SequenceGroup) -> torch.Tensor:
        """Returns the packed output [B, 1, Rq·Bq, D] as [B, H, n_local, D], strided as `like`, zero at padding."""
        buffer = self.combine_exchange.send_buffer(out)
        del out  # before the receive buffer is allocated
        came = self.combine_exchange.run(buffer, group)
        del buffer
        local = torch.empty_like(like)
        self.combine_exchange.deliver(came, local)
        return local


def _on_device(segments: tuple[CopySegments, ...], device: torch.device) -> tuple[CopySegments, ...]:
    return tuple(
        segment if segment.table.device.type == device.type == "cpu" else segment.to(device) for segment in segments
    )


def exchange_q_separately(plan: Plan) -> bool:
    """Returns True if queries are exchanged and unpacked before keys and values, which lowers the peak.

    Without a ring the peak is where the owner has q, k and v twice: as received, and as the kernel reads them. A rank
    whose rows are sparse owns many of them, and would then need more memory than under plain Ulysses. With a ring the
    peak comes later.
    """
    world = plan.strategy.world
    if plan.strategy.ring > 1 or world == 1:
        return False
    rows = np.bincount(plan.owner.ravel(), minlength=world)
    return bool(rows.max() * world > IMBALANCED * plan.owner.size)


_REVERSED = [2, 3, 0, 1, 4]  # columns: to becomes from


def _reversed(segments: CopySegments, table: np.ndarray) -> CopySegments:
    """Returns the copies in rows of a segments' table, in the opposite direction and without filling in zeros."""
    columns = np.zeros_like(table)
    columns[:, :5] = table[:, _REVERSED]
    return CopySegments.from_columns(columns, segments.table.device)


def _readers(segments: CopySegments) -> tuple[CopySegments, ...]:
    """Reverses segments, divided so that none writes to a slot twice: the n-th has each slot's n-th reader.

    Readers of a slot read the same segment, so slots are equal if their first tokens are.
    """
    table = segments.table.cpu().numpy()
    _, target = np.unique(table[:, 0].astype(np.int64) << 32 | table[:, 1], return_inverse=True)
    order = np.argsort(target, kind="stable")
    first = np.searchsorted(target[order], np.arange(int(target.max(initial=-1)) + 1))
    reader = np.empty(len(table), dtype=np.int64)
    reader[order] = np.arange(len(table)) - first[target[order]]
    return tuple(_reversed(segments, table[reader == n]) for n in range(int(reader.max(initial=-1)) + 1))
