"""Routes: the uneven all-to-all that takes (head, block) pieces from their homes to their owners, and its inverse.

Each piece goes straight from home to owner, q, k and v packed into one exchange (or q apart, where memory asks for it,
see `dbsp_core.cost.comm_volume`); what does not change rank does not
travel. A route is tables of runs, made from blocks and fragments: one pass over memory packs what is sent, straight
from the host's own strides, and one unpacks what came, straight into what the kernel reads.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from dbsp_core.comm.groups import SequenceGroup
from dbsp_core.cost.comm_volume import exchange_q_separately
from dbsp_core.layout.sequence_layout import SequenceLayout, ShardSegments
from dbsp_core.masks.grid import BlockAxis
from dbsp_core.planning.plan import Plan
from dbsp_kernels.packing.segment_copy import CopySegments, copy_segments

__all__ = ["Route", "build_route"]


@dataclass(frozen=True, eq=False)
class Route:
    """One rank's side of the exchange.

    sent, received:         tokens of q, k and v together, by destination and by source
    q_sent, q_received:     where queries go ahead, their tokens, and those above are of k and v; else nothing
    returned, came_back:    tokens of the output, likewise
    pack_q, pack_k, pack_v: from home to the send buffer, in which each destination's q, k and v follow one another
    unpack_q, unpack_kv:    from the receive buffer to the packed rows, and to the packed KV blocks (head 0: k, 1: v)
    pack_out, unpack_out:   the way back
    q_places, kv_places:    Rq·Bq and Ck·Bk
    """

    sent: tuple[int, ...]
    received: tuple[int, ...]
    returned: tuple[int, ...]
    came_back: tuple[int, ...]
    pack_q: CopySegments
    pack_k: CopySegments
    pack_v: CopySegments
    unpack_q: CopySegments
    unpack_kv: CopySegments
    pack_out: CopySegments
    unpack_out: CopySegments
    q_places: int
    kv_places: int
    q_sent: tuple[int, ...] = ()
    q_received: tuple[int, ...] = ()

    def to(self, device: torch.device) -> Route:
        """The same with its tables on a device."""
        if self.pack_q.table.device.type == device.type == "cpu":
            return self
        moved: dict[str, Any] = {
            name: one.to(device) for name, one in vars(self).items() if isinstance(one, CopySegments)
        }
        return replace(self, **moved)

    def to_owners(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, group: SequenceGroup
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """q, k, v: [B, H, n_local, D] at home, of any strides.

        returns: packed q [B, Rq·Bq, D] and packed k, v together [2, B, Ck·Bk, D], zero beyond short blocks
        """
        batch, _, _, width = q.shape
        parts = (q, self.pack_q), (k, self.pack_k), (v, self.pack_v)
        if self.q_sent:
            came = _exchange(parts[:1], self.q_sent, self.q_received, group)
        else:
            came = _exchange(parts, self.sent, self.received, group)
        packed_q = q.new_empty(batch, self.q_places, width)
        copy_segments(_by_batch(came), packed_q[:, None], self.unpack_q)
        if self.q_sent:
            del came
            came = _exchange(parts[1:], self.sent, self.received, group)
        packed_kv = q.new_empty(2, batch, self.kv_places, width)
        copy_segments(_by_batch(came), packed_kv.transpose(0, 1), self.unpack_kv)
        return packed_q, packed_kv

    def to_homes(self, out: torch.Tensor, like: torch.Tensor, group: SequenceGroup) -> torch.Tensor:
        """The way back. out: packed [B, Rq·Bq, D]; returns: [B, H, n_local, D], strided as `like`, zero at padding."""
        batch, _, width = out.shape
        buffer = out.new_empty(sum(self.returned), batch, width)
        copy_segments(out[:, None], _by_batch(buffer), self.pack_out)
        del out
        came = group.all_to_all(buffer, self.came_back, self.returned)
        del buffer
        home = torch.empty_like(like, dtype=came.dtype)
        copy_segments(_by_batch(came), home, self.unpack_out)
        return home


def _exchange(
    parts: Sequence[tuple[torch.Tensor, CopySegments]],
    sent: tuple[int, ...],
    received: tuple[int, ...],
    group: SequenceGroup,
) -> torch.Tensor:
    """What comes, [tokens, B, D], for what is packed from these tensors. What is sent is let go."""
    first = parts[0][0]
    buffer = first.new_empty(sum(sent), first.shape[0], first.shape[3])
    for tensor, runs in parts:
        copy_segments(tensor, _by_batch(buffer), runs)
    return group.all_to_all(buffer, received, sent)


def _by_batch(buffer: torch.Tensor) -> torch.Tensor:
    """A buffer [tokens, B, D] as the one head [B, 1, tokens, D] that it is to runs."""
    return buffer.transpose(0, 1)[:, None]


def build_route(plan: Plan, home: SequenceLayout, rank: int, n_local: int, device: torch.device) -> Route:
    """The route of one rank, which holds `n_local` tokens (padding included) at home."""
    strategy, grid = plan.strategy, plan.grid
    queries, keys = _axes(plan, home)
    own_rows = plan.rows_of(rank)
    own_blocks = plan.slot_blocks(rank // strategy.ulysses, rank % strategy.ulysses)
    # 1. Where this rank's pieces are: at home, by the rank that wants them; packed, by the rank they come from.
    q_home = queries.at_home(rank, lambda heads, blocks: plan.q_owner[np.ix_(heads, blocks)][..., None])
    kv_home = keys.at_home(rank, functools.partial(_holders, plan))
    q_packed, kv_packed = queries.packed(*own_rows), keys.packed(*own_blocks)
    # 2. Where they are in the buffers that are exchanged.
    world = strategy.world
    returned, (return_q,) = _buffer_places(world, q_packed)
    came_back, (arrive_q,) = _buffer_places(world, q_home)
    q_sent: tuple[int, ...] = ()
    q_received: tuple[int, ...] = ()
    if exchange_q_separately(plan):
        q_sent, send_q, q_received, receive_q = came_back, arrive_q, returned, return_q  # the way back, turned round
        sent, (send_k, send_v) = _buffer_places(world, kv_home, kv_home)
        received, (receive_k, receive_v) = _buffer_places(world, kv_packed, kv_packed)
    else:
        sent, (send_q, send_k, send_v) = _buffer_places(world, q_home, kv_home, kv_home)
        received, (receive_q, receive_k, receive_v) = _buffer_places(world, q_packed, kv_packed, kv_packed)
    # 3. Runs from the places on one side to those on the other.
    unpack_k = _from_buffer(receive_k, kv_packed)
    unpack_v = _from_buffer(receive_v, replace(kv_packed, head=kv_packed.head + 1))
    return Route(
        sent=sent,
        received=received,
        returned=returned,
        came_back=came_back,
        pack_q=CopySegments.of(_to_buffer(q_home, send_q), device),
        pack_k=CopySegments.of(_to_buffer(kv_home, send_k), device),
        pack_v=CopySegments.of(_to_buffer(kv_home, send_v), device),
        unpack_q=CopySegments.of(_from_buffer(receive_q, q_packed), device),
        unpack_kv=CopySegments.of(np.concatenate([unpack_k, unpack_v]), device),
        pack_out=CopySegments.of(_to_buffer(q_packed, return_q), device),
        unpack_out=CopySegments.of(
            np.concatenate([_from_buffer(arrive_q, q_home), _padding(home, rank, n_local, plan.heads)]), device
        ),
        q_places=len(own_rows[0]) * grid.block_q,
        kv_places=len(own_blocks[0]) * grid.block_k,
        q_sent=q_sent,
        q_received=q_received,
    )


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


def _axes(plan: Plan, home: SequenceLayout) -> tuple[_Axis, _Axis]:
    """Those of queries and of keys."""
    grid = plan.grid
    found = [(heads, home.block_segments(grid, order)) for order, heads in grid.order_groups(plan.heads)]
    queries, keys = (tuple((heads, both[axis]) for heads, both in found) for axis in (0, 1))
    return _Axis(queries, grid.q_axis), _Axis(keys, grid.k_axis)


def _holders(plan: Plan, heads: np.ndarray, blocks: np.ndarray) -> np.ndarray:
    """int64[heads, blocks, x]: the ranks that hold KV blocks in period 0, one in each column that needs the head.

    Their ring rank is the block's slot; -1 for columns that don't need it.
    """
    columns = np.arange(plan.strategy.ulysses)
    holders = plan.kv_slot[np.ix_(heads, blocks)][..., None] * plan.strategy.ulysses + columns
    return np.where(plan.head_columns[heads][:, None, :], holders, -1)


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
