"""The uneven all-to-all that takes (head, block) pieces from the ranks that hold them to their owners, and back.

Each piece goes straight from holder to owner, q, k and v packed into one exchange (or q apart, where memory asks for
it, see `exchange_q_separately`; or needed keys of other ring rows in a second one, that attention to the first hides);
what does not change rank does not travel. An exchange is tables of segments, made
from blocks and shards: one pass over memory packs what is sent, straight from the host's own strides, and one unpacks
what came, straight into what the kernel reads.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from dbsp_core.comm.groups import PendingTransfer, SequenceGroup
from dbsp_core.layout.sequence_layout import SequenceLayout, ShardSegments
from dbsp_core.masks.grid import BlockAxis
from dbsp_core.planning.assignment import Assignment
from dbsp_kernels.packing.segment_copy import CopySegments, copy_segments

__all__ = ["Exchange", "PendingKeys", "Route", "build_route", "by_batch", "exchange_q_separately"]

UNEVEN = 1.05
"""Rows of the rank that has most over their mean, from which on memory counts more than one more exchange."""


@dataclass(frozen=True, eq=False)
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


@dataclass(frozen=True, eq=False)
class Route:
    """How one rank's tensors travel between the layout outside attention and the owners of rows.

    dispatch_exchanges: one of q, k and v; or one of q, and then one of k and v
    combine_exchange:   of the output, on its way back
    q_places, kv_places: Rq·Bq and Ck·Bk, tokens with the places beyond short blocks
    block_k: tokens of a KV block
    fetch_exchange:     of k and v, where needed keys come in a second chunk; `fetched_blocks` of them
    """

    dispatch_exchanges: tuple[Exchange, ...]
    combine_exchange: Exchange
    q_places: int
    kv_places: int
    block_k: int
    fetch_exchange: Exchange | None = None
    fetched_blocks: int = 0

    def to(self, device: torch.device) -> Route:
        """The same with its tables on a device."""
        there = tuple(exchange.to(device) for exchange in self.dispatch_exchanges)
        fetch = None if self.fetch_exchange is None else self.fetch_exchange.to(device)
        return replace(
            self, dispatch_exchanges=there, combine_exchange=self.combine_exchange.to(device), fetch_exchange=fetch
        )

    @property
    def key_exchanges(self) -> tuple[Exchange, ...]:
        """Those that take q, k and v to owners: `dispatch_exchanges`, and `fetch_exchange` where there is one."""
        return (*self.dispatch_exchanges, *([self.fetch_exchange] if self.fetch_exchange else []))

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

    def fetch(self, k: torch.Tensor, v: torch.Tensor, group: SequenceGroup) -> PendingKeys:
        """Starts to exchange the needed keys of the second chunk. k, v: [B, H, n_local, D], outside attention"""
        exchange = self.fetch_exchange
        if exchange is None:
            raise RuntimeError("this route has no second chunk of keys")
        transfer = group.start_all_to_all(exchange.send_buffer(k, v), exchange.received, exchange.sent)
        return PendingKeys(transfer, exchange.unpack[0], self.fetched_blocks, self.block_k)

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


def build_route(
    assignment: Assignment, layout: SequenceLayout, rank: int, n_local: int, device: torch.device
) -> Route:
    """The route of one rank, which holds `n_local` tokens (padding included) outside attention."""
    world, grid = assignment.strategy.world, assignment.grid
    queries, keys = _axes(assignment, layout)
    own_rows, (own_blocks, *later) = assignment.rows_of(rank), assignment.blocks_by_period(rank)
    # 1. Where this rank's pieces are: at home, by the rank that wants them; packed, by the rank they come from.
    q_home = queries.at_home(rank, lambda heads, blocks: assignment.q_owner[np.ix_(heads, blocks)][..., None])
    kv_home = keys.at_home(rank, functools.partial(_holders, assignment, 0))
    q_packed, kv_packed = queries.packed(*own_rows), keys.packed(*own_blocks)
    empty = _padding(layout, rank, n_local, assignment.heads)
    # 2. Which tensors travel together.
    of_q, of_kv = _Travelling.of_one(q_home, q_packed), _Travelling.of_keys(kv_home, kv_packed)
    apart = exchange_q_separately(assignment)
    dispatch = [_exchange(world, part, device) for part in (([of_q], [of_kv]) if apart else ([of_q, of_kv],))]
    # 3. Needed keys that are not in the ring row come in an exchange of their own.
    fetch, fetched_blocks = None, 0
    if assignment.needed is not None and later:
        fetched_home = keys.at_home(rank, functools.partial(_holders, assignment, 1))
        fetch = _exchange(world, [_Travelling.of_keys(fetched_home, keys.packed(*later[0]))], device)
        fetched_blocks = len(later[0][0])
    # 4. The output goes back as queries came, and fills padding with zeros.
    combine = _exchange(world, [_Travelling.of_one(q_packed, q_home)], device, zeros=empty)
    places = len(own_rows[0]) * grid.block_q, len(own_blocks[0]) * grid.block_k
    return Route(tuple(dispatch), combine, *places, grid.block_k, fetch, fetched_blocks)


@dataclass(frozen=True, eq=False)
class _Travelling:
    """Tensors that become one. here: places of each, sorted by destination;  there: by source, of what is made"""

    here: tuple[_Places, ...]
    there: tuple[_Places, ...]

    @classmethod
    def of_one(cls, here: _Places, there: _Places) -> _Travelling:
        return cls((here,), (there,))

    @classmethod
    def of_keys(cls, here: _Places, there: _Places) -> _Travelling:
        """Keys and values, which are packed as heads 0 and 1."""
        return cls((here, here), (there, replace(there, head=there.head + 1)))


def _exchange(
    world: int, parts: Sequence[_Travelling], device: torch.device, zeros: np.ndarray | None = None
) -> Exchange:
    """The exchange of these tensors together. zeros: further columns of Runs for the first that is made"""
    sent, send = _buffer_places(world, *(here for part in parts for here in part.here))
    received, receive = _buffer_places(world, *(there for part in parts for there in part.there))
    pack = [_to_buffer(*one) for one in zip((here for part in parts for here in part.here), send, strict=True)]
    starts = iter(receive)
    unpack = [np.concatenate([_from_buffer(next(starts), there) for there in part.there]) for part in parts]
    if zeros is not None:
        unpack[0] = np.concatenate([unpack[0], zeros])
    return Exchange(sent, received, _segments(pack, device), _segments(unpack, device))


def _segments(tables: Sequence[np.ndarray], device: torch.device) -> tuple[CopySegments, ...]:
    return tuple(CopySegments.of(table, device) for table in tables)


@dataclass(frozen=True, eq=False)
class _Places:
    """Places of (head, fragment) pieces, sorted by the other rank that each goes to or comes from. All int64[n].

    rank:        the other rank
    head, token: the first token's place
    length:      tokens;  zeros: places behind them to be filled with zeros
    """

    rank: np.ndarray
    head: np.ndarray
    token: np.ndarray
    length: np.ndarray
    zeros: np.ndarray

    @classmethod
    def sorted_by_rank(cls, parts: list[tuple[np.ndarray, ...]]) -> _Places:
        """From the fields of several parts, whose order is kept within each rank."""
        rank, *others = (np.concatenate(column) for column in zip(*parts, strict=True))
        order = np.argsort(rank.astype(np.uint16), kind="stable")
        return cls(rank[order], *(column[order] for column in others))


@dataclass(frozen=True, eq=False)
class _Axis:
    """One axis of a plan's grid and the fragments that homes cut its blocks into.

    groups: (int64 heads, their fragments): heads with the same token order share fragments. Every rank walks through
            them alike, so that what is sent in one order is expected in the same
    """

    groups: tuple[tuple[np.ndarray, ShardSegments], ...]
    axis: BlockAxis

    def at_home(self, rank: int, wanting: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> _Places:
        """Home places of the pieces that are on `rank`, once for each rank that wants them.

        wanting: (heads, blocks) -> int[heads, blocks, most], the ranks that want each block, filled up with -1
        """
        parts: list[tuple[np.ndarray, ...]] = []
        for heads, fragments in self.groups:
            here = np.flatnonzero(fragments.rank == rank)
            ranks = wanting(heads, fragments.block[here])
            wanted = np.flatnonzero(ranks >= 0)  # in one dimension: faster
            head, piece = np.divmod(wanted // ranks.shape[2], ranks.shape[1])
            taken = here[piece]
            length = fragments.length[taken]
            parts.append((ranks.ravel()[wanted], heads[head], fragments.local[taken], length, np.zeros_like(length)))
        return _Places.sorted_by_rank(parts)

    def packed(self, head: np.ndarray, block: np.ndarray) -> _Places:
        """Packed places, all of head 0, of the pieces that packed blocks are made of. (head, block): of each, in order

        The last piece of a short block has the zeros behind it that fill the block.
        """
        parts: list[tuple[np.ndarray, ...]] = []
        for heads, fragments in self.groups:
            mine = np.flatnonzero(np.isin(head, heads)) if len(self.groups) > 1 else np.arange(len(head))
            first = np.searchsorted(fragments.block, np.arange(len(self.axis) + 1))
            pieces = np.diff(first)[block[mine]]
            slot = np.repeat(mine, pieces)
            within = np.arange(len(slot)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
            piece = first[block[slot]] + within
            offset, length = fragments.offset[piece], fragments.length[piece]
            last = offset + length == self.axis.lengths[fragments.block[piece]]
            zeros = np.where(last, self.axis.block - offset - length, 0)
            start = slot * self.axis.block + offset
            parts.append((fragments.rank[piece], np.zeros_like(start), start, length, zeros))
        return _Places.sorted_by_rank(parts)


def _axes(assignment: Assignment, layout: SequenceLayout) -> tuple[_Axis, _Axis]:
    """Those of queries and of keys."""
    grid = assignment.grid
    found = [(heads, layout.block_segments(grid, order)) for order, heads in grid.order_groups(assignment.heads)]
    queries, keys = (tuple((heads, both[axis]) for heads, both in found) for axis in (0, 1))
    return _Axis(queries, grid.q_axis), _Axis(keys, grid.k_axis)


def _holders(assignment: Assignment, chunk: int, heads: np.ndarray, blocks: np.ndarray) -> np.ndarray:
    """int64[heads, blocks, most]: the ranks that KV blocks are sent to, filled up with -1.

    The ranks that need them in this chunk; or, where keys travel round the ring, those that hold them in ring step 0,
    one per Ulysses rank that needs them: their ring rank is the block's slot.
    """
    if assignment.needed is not None:
        needed = assignment.chunks[chunk][:, heads][:, :, blocks].transpose(1, 2, 0)
        return np.where(needed, np.arange(assignment.strategy.world), -1)
    ulysses_ranks = np.arange(assignment.strategy.ulysses)
    holders = assignment.kv_slot[np.ix_(heads, blocks)][..., None] * assignment.strategy.ulysses + ulysses_ranks
    return np.where(assignment.head_ulysses_ranks[heads][:, None, :], holders, -1)


def _buffer_places(world: int, *parts: _Places) -> tuple[tuple[int, ...], tuple[np.ndarray, ...]]:
    """Where the pieces of each part are in a buffer that holds, rank after rank, all parts of that rank in turn.

    returns: tokens of each rank, and of each part int64[n], its pieces' first places
    """
    tokens = np.stack([np.bincount(part.rank, part.length, world) for part in parts]).astype(np.int64)
    sizes = tokens.sum(axis=0)
    first = np.cumsum(sizes) - sizes + np.cumsum(tokens, axis=0) - tokens  # of each (part, rank)
    found = []
    for part, of_rank, start in zip(parts, tokens, first, strict=True):
        before = np.cumsum(of_rank) - of_rank  # of the same part, for lower ranks
        found.append(np.cumsum(part.length) - part.length + (start - before)[part.rank])
    return tuple(sizes.tolist()), tuple(found)


def _to_buffer(source: _Places, start: np.ndarray) -> np.ndarray:
    """Columns of Runs, int32[n, 6], that pack pieces into a buffer of one head."""
    return _columns(len(start), source.head, source.token, 0, start, source.length, 0)


def _from_buffer(start: np.ndarray, destination: _Places) -> np.ndarray:
    """Columns of Runs, int32[n, 6], that unpack pieces from a buffer of one head, with the zeros behind them."""
    one = destination
    return _columns(len(start), 0, start, one.head, one.token, one.length, one.zeros)


def _columns(rows: int, *columns: np.ndarray | int) -> np.ndarray:
    """int32[rows, 6] from the columns of Runs, some of which are one number throughout."""
    table = np.empty((rows, len(columns)), dtype=np.int32)
    for place, column in enumerate(columns):
        table[:, place] = column
    return table


def _padding(home: SequenceLayout, rank: int, n_local: int, heads: int) -> np.ndarray:
    """Columns of Runs that write zeros at the places of `rank` that hold no token."""
    empty = np.ones(n_local, dtype=bool)
    empty[home.tokens_at(rank)[1]] = False
    edges = np.flatnonzero(np.diff(empty, prepend=False, append=False))
    first, last = edges[::2], edges[1::2]
    head = np.repeat(np.arange(heads), len(first))
    columns = np.zeros((len(head), 6), dtype=np.int64)
    columns[:, 2], columns[:, 3], columns[:, 5] = head, np.tile(first, heads), np.tile(last - first, heads)
    return columns
