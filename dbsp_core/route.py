"""Routes: the uneven all-to-all that takes (head, block) pieces from their homes to their owners, and its inverse.

Each piece goes straight from home to owner, q, k and v packed into one exchange (or q apart, where memory asks for it,
see `dbsp_core.traffic`); what does not change rank does not
travel. A route is tables of runs, made from blocks and fragments: one pass over memory packs what is sent, straight
from the host's own strides, and one unpacks what came, straight into what the kernel reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from dbsp_core.grid import BlockAxis
from dbsp_core.groups import SequenceGroup
from dbsp_core.home import Fragments, HomeLayout
from dbsp_core.plan import Plan
from dbsp_core.traffic import queries_go_ahead
from dbsp_kernels.runs import Runs, copy_runs

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
    pack_q: Runs
    pack_k: Runs
    pack_v: Runs
    unpack_q: Runs
    unpack_kv: Runs
    pack_out: Runs
    unpack_out: Runs
    q_places: int
    kv_places: int
    q_sent: tuple[int, ...] = ()
    q_received: tuple[int, ...] = ()

    def to(self, device: torch.device) -> Route:
        """The same with its tables on a device."""
        if self.pack_q.table.device.type == device.type == "cpu":
            return self
        moved: dict[str, Any] = {name: one.to(device) for name, one in vars(self).items() if isinstance(one, Runs)}
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
        copy_runs(_by_batch(came), packed_q[:, None], self.unpack_q)
        if self.q_sent:
            del came
            came = _exchange(parts[1:], self.sent, self.received, group)
        packed_kv = q.new_empty(2, batch, self.kv_places, width)
        copy_runs(_by_batch(came), packed_kv.transpose(0, 1), self.unpack_kv)
        return packed_q, packed_kv

    def to_homes(self, out: torch.Tensor, like: torch.Tensor, group: SequenceGroup) -> torch.Tensor:
        """The way back. out: packed [B, Rq·Bq, D]; returns: [B, H, n_local, D], strided as `like`, zero at padding."""
        batch, _, width = out.shape
        buffer = out.new_empty(sum(self.returned), batch, width)
        copy_runs(out[:, None], _by_batch(buffer), self.pack_out)
        del out
        came = group.all_to_all(buffer, self.came_back, self.returned)
        del buffer
        home = torch.empty_like(like, dtype=came.dtype)
        copy_runs(_by_batch(came), home, self.unpack_out)
        return home


def _exchange(
    parts: Sequence[tuple[torch.Tensor, Runs]], sent: tuple[int, ...], received: tuple[int, ...], group: SequenceGroup
) -> torch.Tensor:
    """What comes, [tokens, B, D], for what is packed from these tensors. What is sent is let go."""
    first = parts[0][0]
    buffer = first.new_empty(sum(sent), first.shape[0], first.shape[3])
    for tensor, runs in parts:
        copy_runs(tensor, _by_batch(buffer), runs)
    return group.all_to_all(buffer, received, sent)


def _by_batch(buffer: torch.Tensor) -> torch.Tensor:
    """A buffer [tokens, B, D] as the one head [B, 1, tokens, D] that it is to runs."""
    return buffer.transpose(0, 1)[:, None]


def build_route(plan: Plan, home: HomeLayout, rank: int, n_local: int, device: torch.device) -> Route:
    """The route of one rank, which holds `n_local` tokens (padding included) at home."""
    ranks = range(plan.strategy.world)
    q_pieces, kv_pieces = _Pieces.of(plan, home, plan.grid.q_axis), _Pieces.of(plan, home, plan.grid.k_axis)
    own_rows = plan.rows_of(rank)
    own_blocks = plan.slot_blocks(rank // plan.strategy.ulysses, rank % plan.strategy.ulysses)
    q_home = [q_pieces.at_home(rank, plan.q_owner == owner) for owner in ranks]
    kv_home = [kv_pieces.at_home(rank, _kv_wanted(plan, owner)) for owner in ranks]
    q_packed = [q_pieces.packed(source, own_rows) for source in ranks]
    kv_packed = [kv_pieces.packed(source, own_blocks) for source in ranks]
    returned, (return_q,) = _buffer_places(q_packed)
    came_back, (arrive_q,) = _buffer_places(q_home)
    q_sent: tuple[int, ...] = ()
    q_received: tuple[int, ...] = ()
    if queries_go_ahead(plan):
        q_sent, send_q, q_received, receive_q = came_back, arrive_q, returned, return_q  # the way back, turned round
        sent, (send_k, send_v) = _buffer_places(kv_home, kv_home)
        received, (receive_k, receive_v) = _buffer_places(kv_packed, kv_packed)
    else:
        sent, (send_q, send_k, send_v) = _buffer_places(q_home, kv_home, kv_home)
        received, (receive_q, receive_k, receive_v) = _buffer_places(q_packed, kv_packed, kv_packed)
    to_k, to_v = np.concatenate(kv_packed), np.concatenate(kv_packed)
    to_v[:, 0] = 1

    def runs(source: np.ndarray, destination: np.ndarray) -> np.ndarray:
        """Columns of Runs: from the places of one side to those of the other, with the destination's zeros."""
        return np.concatenate([source[:, :2], destination[:, :2], destination[:, 2:]], axis=1)

    from_q, from_kv, to_q = np.concatenate(q_home), np.concatenate(kv_home), np.concatenate(q_packed)
    kv_runs = np.concatenate([runs(receive_k, to_k), runs(receive_v, to_v)])
    home_runs = np.concatenate([runs(arrive_q, from_q), _padding(home, rank, n_local, plan.heads)])
    return Route(
        sent=sent,
        received=received,
        returned=returned,
        came_back=came_back,
        pack_q=Runs.of(runs(from_q, send_q), device),
        pack_k=Runs.of(runs(from_kv, send_k), device),
        pack_v=Runs.of(runs(from_kv, send_v), device),
        unpack_q=Runs.of(runs(receive_q, to_q), device),
        unpack_kv=Runs.of(kv_runs, device),
        pack_out=Runs.of(runs(to_q, return_q), device),
        unpack_out=Runs.of(home_runs, device),
        q_places=len(own_rows[0]) * plan.grid.block_q,
        kv_places=len(own_blocks[0]) * plan.grid.block_k,
        q_sent=q_sent,
        q_received=q_received,
    )


@dataclass(frozen=True, eq=False)
class _Pieces:
    """The (head, fragment) pieces of one axis: heads with the same token order share fragments.

    groups: (int64 heads, their fragments); every rank walks through them alike, so that what is sent in one order is
            expected in the same

    Places are int64[n, 4]: head, token, length, zeros to write behind.
    """

    groups: tuple[tuple[np.ndarray, Fragments], ...]
    heads: int
    axis: BlockAxis

    @classmethod
    def of(cls, plan: Plan, home: HomeLayout, axis: BlockAxis) -> _Pieces:
        groups = plan.grid.order_groups(plan.heads)
        fragments = tuple((heads, home.fragments(axis, plan.grid.standing(order))) for order, heads in groups)
        return cls(fragments, plan.heads, axis)

    def at_home(self, rank: int, wanted: np.ndarray) -> np.ndarray:
        """Home places of the wanted pieces that live on `rank`. wanted: bool[H, blocks]"""
        places = []
        for heads, fragments in self.groups:
            here = np.flatnonzero(fragments.rank == rank)
            head, piece = np.nonzero(wanted[heads][:, fragments.block[here]])
            piece = here[piece]
            length = fragments.length[piece]
            places.append(np.stack([heads[head], fragments.local[piece], length, np.zeros_like(length)], axis=1))
        return np.concatenate(places)

    def packed(self, source: int, blocks: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
        """Packed places of the pieces that come from `source`, of head 0. blocks: (head, block) of each packed block

        The last piece of a short block has the zeros behind it that fill the block.
        """
        place = np.full((self.heads, len(self.axis)), -1, dtype=np.int64)
        place[blocks] = np.arange(len(blocks[0])) * self.axis.block
        places = []
        for heads, fragments in self.groups:
            there = np.flatnonzero(fragments.rank == source)
            start = place[heads][:, fragments.block[there]]
            head, piece = np.nonzero(start >= 0)
            start, piece = start[head, piece], there[piece]
            offset, length = fragments.offset[piece], fragments.length[piece]
            is_last = offset + length == self.axis.lengths[fragments.block[piece]]
            zeros = np.where(is_last, self.axis.block - offset - length, 0)
            places.append(np.stack([np.zeros_like(start), start + offset, length, zeros], axis=1))
        return np.concatenate(places)


def _buffer_places(*parts: list[np.ndarray]) -> tuple[tuple[int, ...], tuple[np.ndarray, ...]]:
    """Where the pieces of each part lie in a buffer that holds, rank after rank, all parts of that rank in turn.

    parts: by rank, places of pieces
    returns: tokens of each rank, and of each part the places of its pieces in the buffer, zeros left out
    """
    cursor, sizes = 0, []
    found: list[list[np.ndarray]] = [[] for _ in parts]
    for of_rank in zip(*parts, strict=True):
        first = cursor
        for places, pieces in zip(found, of_rank, strict=True):
            length = pieces[:, 2]
            start = cursor + np.cumsum(length) - length
            places.append(np.stack([np.zeros_like(start), start, length, np.zeros_like(start)], axis=1))
            cursor += int(length.sum())
        sizes.append(cursor - first)
    return tuple(sizes), tuple(np.concatenate(places) for places in found)


def _padding(home: HomeLayout, rank: int, n_local: int, heads: int) -> np.ndarray:
    """Columns of Runs that write zeros at the places of `rank` that hold no token."""
    empty = np.ones(n_local, dtype=bool)
    empty[home.tokens_at(rank)[1]] = False
    edges = np.flatnonzero(np.diff(empty, prepend=False, append=False))
    first, last = edges[::2], edges[1::2]
    head = np.repeat(np.arange(heads), len(first))
    columns = np.zeros((len(head), 6), dtype=np.int64)
    columns[:, 2], columns[:, 3], columns[:, 5] = head, np.tile(first, heads), np.tile(last - first, heads)
    return columns


def _kv_wanted(plan: Plan, rank: int) -> np.ndarray:
    """bool[H, nk]: the KV blocks that `rank` holds in period 0: its ring rank's slot, for its column's heads."""
    ring_rank, column = divmod(rank, plan.strategy.ulysses)
    return (plan.kv_slot == ring_rank) & plan.head_columns[:, column, None]
