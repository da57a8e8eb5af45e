"""The uneven all-to-all that takes (head, block) pieces from the ranks that hold them to their owners, and back.

Each piece goes straight from holder to owner, q, k and v packed into one exchange (or q apart, where memory asks for
it, see `exchange_q_separately`); what does not change rank does not travel. An exchange is tables of segments, made
from blocks and shards: one pass over memory packs what is sent, straight from the host's own strides, and one unpacks
what came, straight into what the kernel reads.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from dbsp_core.comm.groups import SequenceGroup
from dbsp_core.layout.sequence_layout import SequenceLayout, ShardSegments
from dbsp_core.masks.grid import BlockAxis
from dbsp_core.planning.assignment import Assignment
from dbsp_kernels.packing.segment_copy import CopySegments, copy_segments

__all__ = ["Exchange", "Route", "build_route", "by_batch", "exchange_q_separately"]

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


@dataclass(frozen=True, eq=False)
class Route:
    """How one rank's tensors travel between the layout outside attention and the owners of rows.

    dispatch_exchanges: one of q, k and v; or one of q, and then one of k and v
    combine_exchange:   of the output, on its way back
    q_places, kv_places: Rq·Bq and Ck·Bk, tokens with the places beyond short blocks
    """

    dispatch_exchanges: tuple[Exchange, ...]
    combine_exchange: Exchange
    q_places: int
    kv_places: int

    def to(self, device: torch.device) -> Route:
        """The same with its tables on a device."""
        there = tuple(exchange.to(device) for exchange in self.dispatch_exchanges)
        return replace(self, dispatch_exchanges=there, combine_exchange=self.combine_exchange.to(device))

    def tokens_sent(self, rank: int) -> tuple[int, int]:
        """How many tokens of one head `rank`, whose route this is, sends to others: in dispatch, and in combine."""
        dispatch, combine = (
            sum(sum(one.sent) - one.sent[rank] for one in exchanges)
            for exchanges in (self.dispatch_exchanges, (self.combine_exchange,))
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
    strategy, grid = assignment.strategy, assignment.grid
    queries, keys = _axes(assignment, layout)
    own_rows = assignment.rows_of(rank)
    own_blocks = assignment.slot_blocks(rank // strategy.ulysses, rank % strategy.ulysses)
    # 1. Where this rank's pieces are: at home, by the rank that wants them; packed, by the rank they come from.
    q_home = queries.at_home(rank, lambda heads, blocks: assignment.q_owner[np.ix_(heads, blocks)][..., None])
    kv_home = keys.at_home(rank, functools.partial(_holders, assignment))
    q_packed, kv_packed = queries.packed(*own_rows), keys.packed(*own_blocks)
    v_packed = replace(kv_packed, head=kv_packed.head + 1)
    empty = _padding(layout, rank, n_local, assignment.heads)
    # 2. Which tensors travel together, and where the pieces of each are in the buffers that are exchanged.
    apart = exchange_q_separately(assignment)
    together = (("q",), ("k", "v")) if apart else (("q", "k", "v"),)
    home, packed = {"q": q_home, "k": kv_home, "v": kv_home}, {"q": q_packed, "k": kv_packed, "v": v_packed}
    dispatch = []
    for names in together:
        sent, send = _buffer_places(strategy.world, *(home[name] for name in names))
        received, receive = _buffer_places(strategy.world, *(packed[name] for name in names))
        # 3. Segments from the places on one side to those on the other.
        pack = [_to_buffer(home[name], start) for name, start in zip(names, send, strict=True)]
        came = {name: _from_buffer(start, packed[name]) for name, start in zip(names, receive, strict=True)}
        unpack = [came["q"]] if "q" in came else []
        if "k" in came:
            unpack.append(np.concatenate([came["k"], came["v"]]))
        dispatch.append(Exchange(sent, received, _segments(pack, device), _segments(unpack, device)))
    returned, (send_out,) = _buffer_places(strategy.world, q_packed)
    came_back, (receive_out,) = _buffer_places(strategy.world, q_home)
    unpack_out = np.concatenate([_from_buffer(receive_out, q_home), empty])
    combine = Exchange(
        returned, came_back, _segments([_to_buffer(q_packed, send_out)], device), _segments([unpack_out], device)
    )
    return Route(tuple(dispatch), combine, len(own_rows[0]) * grid.block_q, len(own_blocks[0]) * grid.block_k)


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


def _holders(assignment: Assignment, heads: np.ndarray, blocks: np.ndarray) -> np.ndarray:
    """int64[heads, blocks, x]: the ranks that hold KV blocks in ring step 0, one per Ulysses rank that needs them.

    Their ring rank is the block's slot; -1 for Ulysses ranks that don't need it.
    """
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
