"""Routes: the uneven all-to-all that takes (head, block) pieces from their homes to their owners, and its inverse.

Each piece goes straight from home to owner, q, k and v packed into one exchange; what does not change rank does not
travel. Tables are made from blocks and fragments; token indices are expanded on the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from dbsp_core.grid import BlockAxis
from dbsp_core.groups import SequenceGroup
from dbsp_core.home import Fragments, HomeLayout
from dbsp_core.plan import Plan

__all__ = ["Route", "build_route"]


@dataclass(frozen=True, eq=False)
class Route:
    """One rank's side of the exchange, in tokens.

    q_send, kv_send:       by destination, int64 places in the home tensor seen as [H·n_local]
    q_receive, kv_receive: by source, int64 places among the packed rows [Rq·Bq] and KV blocks [Ck·Bk]
    """

    q_send: tuple[torch.Tensor, ...]
    kv_send: tuple[torch.Tensor, ...]
    q_receive: tuple[torch.Tensor, ...]
    kv_receive: tuple[torch.Tensor, ...]
    home_places: int
    q_places: int
    kv_places: int

    def to_owners(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, group: SequenceGroup
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """q, k, v: [H·n_local, W] at home.

        returns: packed q [Rq·Bq, W] and packed k, v together [2, Ck·Bk, W], zero beyond short blocks
        """
        send_sizes = [len(qs) + 2 * len(kvs) for qs, kvs in zip(self.q_send, self.kv_send, strict=True)]
        receive_sizes = [len(qr) + 2 * len(kvr) for qr, kvr in zip(self.q_receive, self.kv_receive, strict=True)]
        sent = q.new_empty(sum(send_sizes), q.shape[1])
        parts = ((q, self.q_send), (k, self.kv_send), (v, self.kv_send))
        cursor = 0
        for rank in range(len(send_sizes)):
            for tensor, places in parts:
                size = len(places[rank])
                torch.index_select(tensor, 0, places[rank], out=sent[cursor : cursor + size])
                cursor += size
        received = group.all_to_all(sent, receive_sizes, send_sizes)
        packed_q = q.new_zeros(self.q_places, q.shape[1])
        packed_kv = k.new_zeros(2, self.kv_places, k.shape[1])
        for rank, chunk in enumerate(received.split(receive_sizes)):
            q_places, kv_places = self.q_receive[rank], self.kv_receive[rank]
            q_part, k_part, v_part = chunk.split([len(q_places), len(kv_places), len(kv_places)])
            packed_q.index_copy_(0, q_places, q_part)
            packed_kv[0].index_copy_(0, kv_places, k_part)
            packed_kv[1].index_copy_(0, kv_places, v_part)
        return packed_q, packed_kv

    def to_homes(self, out: torch.Tensor, group: SequenceGroup) -> torch.Tensor:
        """The way back. out: packed [Rq·Bq, W]; returns: [H·n_local, W], zero at padding tokens."""
        sent = out.index_select(0, torch.cat(self.q_receive))
        received = group.all_to_all(sent, [len(p) for p in self.q_send], [len(p) for p in self.q_receive])
        home = out.new_zeros(self.home_places, out.shape[1])
        return home.index_copy_(0, torch.cat(self.q_send), received)


def build_route(plan: Plan, home: HomeLayout, rank: int, n_local: int, device: torch.device) -> Route:
    """The route of one rank, which holds `n_local` tokens (padding included) at home."""
    ranks = range(plan.strategy.world)
    q_pieces, kv_pieces = _Pieces.of(plan, home, plan.grid.q_axis), _Pieces.of(plan, home, plan.grid.k_axis)
    own_rows = plan.rows_of(rank)
    own_blocks = plan.slot_blocks(rank // plan.strategy.ulysses, rank % plan.strategy.ulysses)
    return Route(
        q_send=tuple(q_pieces.at_home(rank, plan.q_owner == owner, n_local, device) for owner in ranks),
        kv_send=tuple(kv_pieces.at_home(rank, _kv_wanted(plan, owner), n_local, device) for owner in ranks),
        q_receive=tuple(q_pieces.packed(source, own_rows, device) for source in ranks),
        kv_receive=tuple(kv_pieces.packed(source, own_blocks, device) for source in ranks),
        home_places=plan.heads * n_local,
        q_places=len(own_rows[0]) * plan.grid.block_q,
        kv_places=len(own_blocks[0]) * plan.grid.block_k,
    )


@dataclass(frozen=True, eq=False)
class _Pieces:
    """The (head, fragment) pieces of one axis: heads with the same token order share fragments.

    groups: (int64 heads, their fragments); every rank walks through them alike, so that what is sent in one order is
            expected in the same
    """

    groups: tuple[tuple[np.ndarray, Fragments], ...]
    heads: int
    axis: BlockAxis

    @classmethod
    def of(cls, plan: Plan, home: HomeLayout, axis: BlockAxis) -> _Pieces:
        groups = plan.grid.order_groups(plan.heads)
        fragments = tuple((heads, home.fragments(axis, plan.grid.standing(order))) for order, heads in groups)
        return cls(fragments, plan.heads, axis)

    def at_home(self, rank: int, wanted: np.ndarray, n_local: int, device: torch.device) -> torch.Tensor:
        """Home places of the wanted pieces that live on `rank`. wanted: bool[H, blocks]"""
        starts, lengths = [], []
        for heads, fragments in self.groups:
            here = np.flatnonzero(fragments.rank == rank)
            head, piece = np.nonzero(wanted[heads][:, fragments.block[here]])
            piece = here[piece]
            starts.append(heads[head] * n_local + fragments.local[piece])
            lengths.append(fragments.length[piece])
        return _expand(np.concatenate(starts), np.concatenate(lengths), device)

    def packed(self, source: int, blocks: tuple[np.ndarray, np.ndarray], device: torch.device) -> torch.Tensor:
        """Packed places of the pieces that come from `source`. blocks: (head, block) of every packed block"""
        place = np.full((self.heads, len(self.axis)), -1, dtype=np.int64)
        place[blocks] = np.arange(len(blocks[0])) * self.axis.block
        starts, lengths = [], []
        for heads, fragments in self.groups:
            there = np.flatnonzero(fragments.rank == source)
            start = place[heads][:, fragments.block[there]]
            head, piece = np.nonzero(start >= 0)
            starts.append(start[head, piece] + fragments.offset[there[piece]])
            lengths.append(fragments.length[there[piece]])
        return _expand(np.concatenate(starts), np.concatenate(lengths), device)


def _kv_wanted(plan: Plan, rank: int) -> np.ndarray:
    """bool[H, nk]: the KV blocks that `rank` holds in period 0: its ring rank's slot, for its column's heads."""
    ring_rank, column = divmod(rank, plan.strategy.ulysses)
    return (plan.kv_slot == ring_rank) & plan.head_columns[:, column, None]


def _expand(starts: np.ndarray, lengths: np.ndarray, device: torch.device) -> torch.Tensor:
    """The places start, start + 1, … of every run, one after the other, expanded on the device."""
    total = int(lengths.sum())
    runs = torch.from_numpy(lengths).to(device)
    before = torch.from_numpy(starts - (np.cumsum(lengths) - lengths)).to(device)
    return torch.repeat_interleave(before, runs, output_size=total) + torch.arange(total, device=device)
