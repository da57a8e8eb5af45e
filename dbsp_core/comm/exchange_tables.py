"""Builds routes: one rank's tables of segments for a plan and a sequence layout."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch

from dbsp_core.comm.exchange import Exchange, Route
from dbsp_core.layout.sequence_layout import SequenceLayout, ShardSegments
from dbsp_core.masks.grid import BlockAxis
from dbsp_core.planning.comm_dtype import CommDtype
from dbsp_core.planning.plan import Plan
from dbsp_kernels.segments import CopySegments

CPU = torch.device("cpu")
IMBALANCED = 1.05
"""Ratio of a rank's rows to the mean above which saving memory is worth another exchange."""


def build_route(plan: Plan, layout: SequenceLayout, rank: int, n_local: int) -> Route:
    """Builds the route of a rank with `n_local` tokens (padding included) outside attention, on the CPU."""
    world, grid, comm_dtype = plan.strategy.world, plan.grid, plan.comm_dtype
    segments = [(heads, layout.block_segments(grid, order)) for order, heads in grid.order_groups(plan.heads)]
    queries = _Axis(tuple((heads, of_q) for heads, (of_q, _) in segments), grid.q_axis)
    keys = _Axis(tuple((heads, of_k) for heads, (_, of_k) in segments), grid.k_axis)
    own_rows, (own_blocks, *later) = plan.rows_of(rank), plan.chunks.blocks_for(rank)
    # 1. Slots of this rank's pieces: local slots by the rank that needs them, packed slots by source rank
    local_q = queries.local(rank, lambda heads, blocks: plan.owner[np.ix_(heads, blocks)][..., None])
    local_kvs = [keys.local(rank, functools.partial(plan.chunks.readers, chunk)) for chunk in range(1 + len(later))]
    q_packed, kv_packed = queries.packed(*own_rows), keys.packed(*own_blocks)
    # 2. Exchanges of q and of k and v, or of all three together
    of_q, of_kv = ([local_q], [q_packed]), _of_keys(local_kvs[0], kv_packed)
    parts = [[of_kv], [of_q]] if exchange_q_separately(plan) else [[of_q, of_kv]]
    dispatch = [_exchange(world, part, comm_dtype) for part in parts]
    # 3. One exchange for each further chunk of keys
    fetch = tuple(
        _exchange(world, [_of_keys(local_kv, keys.packed(*blocks))], comm_dtype)
        for local_kv, blocks in zip(local_kvs[1:], later, strict=True)
    )
    fetched_blocks = tuple(len(head) for head, _ in later)
    # 4. The output returns like the queries came, with zeros at slots without a token
    empty = np.ones(n_local, dtype=bool)
    empty[layout.tokens_at(rank)[1]] = False
    edges = np.flatnonzero(np.diff(empty, prepend=False, append=False))
    first, last = edges[::2], edges[1::2]
    head = np.repeat(np.arange(plan.heads), len(first))
    padding = _copies(0, 0, head, np.tile(first, plan.heads), 0, np.tile(last - first, plan.heads))
    combine = _exchange(world, [([q_packed], [local_q])], comm_dtype, zeros=padding, returns=True)
    slots = len(own_rows[0]) * grid.block_q, len(own_blocks[0]) * grid.block_k
    return Route(tuple(dispatch), combine, *slots, grid.block_k, fetch, fetched_blocks, _packed_again(fetch))


def exchange_q_separately(plan: Plan) -> bool:
    """Returns True if queries are exchanged after keys and values are unpacked, which lowers peak memory.

    Without a ring, memory peaks when the owner has q, k and v both as received and as the kernel reads them. An owner
    of many sparse rows would then need more memory than under plain Ulysses. With a ring the peak comes later.
    """
    world = plan.strategy.world
    if plan.strategy.ring > 1 or world == 1:
        return False
    rows = np.bincount(plan.owner.ravel(), minlength=world)
    return bool(rows.max() * world > IMBALANCED * plan.owner.size)


def _packed_again(exchanges: Sequence[Exchange]) -> tuple[bool, ...]:
    """Returns for each exchange True if it packs the same tokens as the previous one in the same order."""
    tables = [[segments.table for segments in exchange.pack] for exchange in exchanges]
    of_pairs = (zip(*pair, strict=True) for pair in pairwise(tables))
    return (False,) * len(tables[:1]) + tuple(all(torch.equal(a, b) for a, b in pair) for pair in of_pairs)


def _of_keys(here: _Slots, there: _Slots) -> _Part:
    """Returns the slots of keys and values, packed as heads 0 and 1."""
    return [here, here], [there, replace(there, head=there.head + 1)]


def _exchange(
    world: int,
    parts: Sequence[_Part],
    comm_dtype: CommDtype,
    *,
    zeros: np.ndarray | None = None,
    returns: bool = False,
) -> Exchange:
    """Builds the exchange of several parts; `zeros` int[n, 6] are segments added to unpacking the first part."""
    sources = [here for part, _ in parts for here in part]
    sent, send = _buffer_slots(world, sources)
    received, receive = _buffer_slots(world, [there for _, part in parts for there in part])
    pack = [
        _copies(source.head, source.token, 0, start, source.length, 0)
        for source, start in zip(sources, send, strict=True)
    ]
    starts = iter(receive)
    unpack = [
        np.concatenate(
            [_copies(0, next(starts), target.head, target.token, target.length, target.zeros) for target in part]
        )
        for _, part in parts
    ]
    if zeros is not None:
        unpack[0] = np.concatenate([unpack[0], zeros])
    # In order: unpacking keys and values would copy every token to the same position.
    _, start, head, token, length, filled = unpack[0].T
    in_order = not filled.any() and bool((head * (length.sum() // 2) + token == start).all())
    packs = tuple(CopySegments.from_columns(table, CPU) for table in pack)
    copies = tuple((CopySegments.from_columns(table, CPU),) for table in unpack)
    return Exchange(sent, received, packs, copies, comm_dtype, in_order=in_order, returns=returns)


@dataclass(frozen=True, eq=False)
class _Slots:
    """Slots of (head, segment) pieces, sorted by the `rank` that each goes to or comes from; all int64[n].

    A piece has `length` tokens from slot `token` of `head` on, then `zeros` slots to fill with zeros.
    """

    rank: np.ndarray
    head: np.ndarray
    token: np.ndarray
    length: np.ndarray
    zeros: np.ndarray

    @classmethod
    def sorted_by_rank(cls, parts: list[tuple[np.ndarray, ...]]) -> _Slots:
        """Concatenates the fields of several parts, stably sorted by rank."""
        rank, *others = (np.concatenate(column) for column in zip(*parts, strict=True))
        order = np.argsort(rank.astype(np.uint16), kind="stable")
        return cls(rank[order], *(column[order] for column in others))


_Part = tuple[list[_Slots], list[_Slots]]
"""Tensors that are unpacked into one tensor: slots at the sender by destination, and at the receiver by source."""


@dataclass(frozen=True, eq=False)
class _Axis:
    """One axis of a plan's grid, with the segments into which shards cut its blocks."""

    # (int64 heads, their segments); heads with equal token order share segments. All ranks use this order, so that
    # pieces arrive in the expected order.
    groups: tuple[tuple[np.ndarray, ShardSegments], ...]
    axis: BlockAxis

    def local(self, rank: int, ranks_needing: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> _Slots:
        """Returns the local slots of the pieces on `rank`, once for each rank that needs them.

        `ranks_needing` maps heads and blocks to int[heads, blocks, most] of ranks, filled up with -1.
        """
        parts: list[tuple[np.ndarray, ...]] = []
        for heads, segments in self.groups:
            here = np.flatnonzero(segments.rank == rank)
            ranks = ranks_needing(heads, segments.block[here])
            needed = np.flatnonzero(ranks >= 0)  # 1-D is faster
            head, piece = np.divmod(needed // ranks.shape[2], ranks.shape[1])
            taken = here[piece]
            length = segments.length[taken]
            parts.append((ranks.ravel()[needed], heads[head], segments.local[taken], length, np.zeros_like(length)))
        return _Slots.sorted_by_rank(parts)

    def packed(self, head: np.ndarray, block: np.ndarray) -> _Slots:
        """Returns the slots (all in head 0) of the pieces of packed blocks, by head and block in packing order.

        The last piece of a short block is followed by zeros that fill the block.
        """
        parts: list[tuple[np.ndarray, ...]] = []
        for heads, segments in self.groups:
            mine = np.flatnonzero(np.isin(head, heads)) if len(self.groups) > 1 else np.arange(len(head))
            first = np.searchsorted(segments.block, np.arange(len(self.axis) + 1))
            pieces = np.diff(first)[block[mine]]
            slot = np.repeat(mine, pieces)
            within = np.arange(len(slot)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
            piece = first[block[slot]] + within
            offset, length = segments.offset[piece], segments.length[piece]
            last = offset + length == self.axis.lengths[segments.block[piece]]
            zeros = np.where(last, self.axis.block - offset - length, 0)
            start = slot * self.axis.block + offset
            parts.append((segments.rank[piece], np.zeros_like(start), start, length, zeros))
        return _Slots.sorted_by_rank(parts)


def _buffer_slots(world: int, parts: Sequence[_Slots]) -> tuple[tuple[int, ...], tuple[np.ndarray, ...]]:
    """Lays out a buffer of all parts by rank → tokens per rank; for each part int64[n], each piece's first slot."""
    tokens = np.stack([np.bincount(part.rank, part.length, world) for part in parts]).astype(np.int64)
    sizes = tokens.sum(axis=0)
    first = np.cumsum(sizes) - sizes + np.cumsum(tokens, axis=0) - tokens  # [part, rank]
    starts_by_part = []
    for part, of_rank, start in zip(parts, tokens, first, strict=True):
        before = np.cumsum(of_rank) - of_rank  # same part, lower ranks
        starts_by_part.append(np.cumsum(part.length) - part.length + (start - before)[part.rank])
    return tuple(sizes.tolist()), tuple(starts_by_part)


def _copies(*columns: np.ndarray | int) -> np.ndarray:
    """Stacks columns of `CopySegments` (scalars are broadcast) → int32[n, 6]."""
    return np.stack(np.broadcast_arrays(*columns), axis=1, dtype=np.int32, casting="unsafe")
