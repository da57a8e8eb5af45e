"""Pooled queries and keys from all ranks' tokens, each head's on one rank, before any query or key itself travels.

A block that is complete on one rank is sent as its mean and similarity; of one that straddles ranks each sends sums.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from dbsp_core.comm.groups import SequenceGroup
from dbsp_core.layout.sequence_layout import SequenceLayout
from dbsp_core.masks.grid import BlockAxis, BlockGrid
from dbsp_core.masks.token_order import CANONICAL
from dbsp_core.planning.baselines import contiguous_heads
from dbsp_core.sources.base import LocalQK
from dbsp_kernels.packing.h2d import to_device
from dbsp_kernels.packing.row_bits import unpack_bits
from dbsp_kernels.prediction.pooling import BlockRuns, block_runs, pool_rows, sum_tokens

__all__ = ["assigned_heads", "exchange_heads", "gather_bits", "pool_own_heads", "traffic"]


def assigned_heads(rank: int, heads: int, ranks: int) -> np.ndarray:
    """The heads whose masks `rank` predicts: even runs. int64"""
    return np.flatnonzero(contiguous_heads(heads, ranks) == rank)


def pool_own_heads(tokens: LocalQK, grid: BlockGrid) -> torch.Tensor:
    """q and k of the heads whose masks this rank predicts, pooled over all ranks. Collective.

    returns: float32[Hs, B, nq + nk, D + 1], of every query block and then of every key block its mean and similarity
    """
    group, device = tokens.group, tokens.q.device
    batch, heads, _, width = tokens.q.shape
    blocks = _ShardedBlocks.of(tokens.layout, grid)
    q, k = (blocks.places(side, group.rank, device) for side in (0, 1))
    # 1. Each rank sums its own tokens of all heads: complete blocks become means, straddling ones stay integer sums.
    sums = [sum_tokens(t, *side.blocks) for t, side in zip((tokens.q, tokens.k), (q, k), strict=True)]
    means = [pool_rows(one[:, :, : len(side.lengths)], side.lengths) for one, side in zip(sums, (q, k), strict=True)]
    shared = [one[:, :, len(side.lengths) :] for one, side in zip(sums, (q, k), strict=True)]
    # 2. Rows travel to the rank that predicts their head, q's and k's in one exchange of either kind.
    shares = [len(assigned_heads(rank, heads, group.size)) for rank in range(group.size)]
    complete = exchange_heads(torch.cat(means, dim=2), shares, [len(own) for own in blocks.complete], group)
    straddling = exchange_heads(torch.cat(shared, dim=2), shares, [len(own) for own in blocks.straddling], group)
    # 3. There means take their blocks' places, and sums of straddling blocks are added up and become means.
    copies, lengths = shares[group.rank] * batch, blocks.lengths
    order, into, split, of_split = blocks.arrivals(copies, device)
    if len(complete):
        rows = complete.index_select(0, order)
    else:  # every block straddles ranks
        rows = complete.new_empty(copies * len(lengths), width + 1)
    rows = rows.view(shares[group.rank], batch, len(lengths), width + 1)
    if len(split):
        added = straddling.new_zeros(copies * len(split), 2 * width).index_add_(0, into, straddling)
        rows.index_copy_(2, split, pool_rows(added.view(*rows.shape[:2], len(split), 2 * width), of_split))
    return rows


def gather_bits(mine: torch.Tensor, heads: int, batch: int, columns: int, group: SequenceGroup) -> torch.Tensor:
    """Every rank's heads' bits. Collective.

    mine:    uint8[Hs · B, nq, ceil(columns / 8)], of `assigned_heads(rank)`, from `pack_bits`
    returns: bool[B · heads, nq, columns]
    """
    # 1. Ranks send equally many heads, the last ones of some being padding.
    most = -(-heads // group.size) * batch
    padded = mine if len(mine) == most else mine.new_empty(most, *mine.shape[1:])
    if padded is not mine:
        padded[: len(mine)] = mine
    everyone = group.all_gather_along(padded)
    # 2. Heads take their places, the padding is dropped, and bits are unpacked.
    return unpack_bits(everyone.index_select(0, _gathered_heads(heads, batch, group.size, mine.device)), columns)


@functools.lru_cache(maxsize=8)
def _gathered_heads(heads: int, batch: int, ranks: int, device: torch.device) -> torch.Tensor:
    """int64[B · heads]: where each sample's heads are among what all ranks gathered."""
    most = -(-heads // ranks)
    places = np.concatenate(
        [rank * most + np.arange(len(assigned_heads(rank, heads, ranks))) for rank in range(ranks)]
    )
    return to_device((places * batch + np.arange(batch)[:, None]).ravel(), device)


def traffic(layout: SequenceLayout, grid: BlockGrid, heads: int, width: int, batch: int = 1) -> int:
    """Bytes that the busiest rank receives for one mask: pooled blocks of its heads, and the other heads' bits."""
    most, others = -(-heads // layout.world), layout.world - 1
    blocks = _ShardedBlocks.of(layout, grid)
    complete = sum(map(len, blocks.complete)) * 4 * (width + 1)
    straddling = sum(map(len, blocks.straddling)) * 16 * width
    bits = batch * most * grid.nq * -(-grid.nk // 8)
    return batch * most * (complete + straddling) * others // layout.world + others * bits


class _OwnBlocks(NamedTuple):
    """A rank's blocks of q or of k. blocks: for `sum_tokens`;  lengths: int64, tokens of each complete one"""

    blocks: tuple[torch.Tensor, torch.Tensor, BlockRuns]
    lengths: torch.Tensor


@dataclass(frozen=True, eq=False)
class _ShardedBlocks:
    """How the blocks of queries, and after them those of keys, are distributed over the ranks.

    token_permutation: int64[tokens], the tokens in the order of the blocks
    complete:   by rank, int64, the blocks that it has all tokens of
    straddling: by rank, int64, the blocks that it has some tokens of
    """

    layout: SequenceLayout
    axes: tuple[BlockAxis, BlockAxis]
    token_permutation: np.ndarray
    complete: tuple[np.ndarray, ...]
    straddling: tuple[np.ndarray, ...]

    @classmethod
    @functools.lru_cache(maxsize=8)  # the same at every attention of a video size
    def of(cls, layout: SequenceLayout, grid: BlockGrid) -> _ShardedBlocks:
        axes = grid.q_axis, grid.k_axis
        permutation = grid.token_permutation(grid.common_order or CANONICAL)
        lengths = np.concatenate([axis.lengths for axis in axes])
        tokens = np.zeros((layout.world, len(lengths)), dtype=np.int64)
        for axis, first in zip(axes, (0, grid.nq), strict=True):
            np.add.at(tokens, (layout.rank[permutation], first + axis.block_of), 1)
        complete = tuple(np.flatnonzero(mine == lengths) for mine in tokens)
        straddling = tuple(np.flatnonzero((mine > 0) & (mine < lengths)) for mine in tokens)
        return cls(layout, axes, permutation, complete, straddling)

    @property
    def lengths(self) -> np.ndarray:
        """int64[nq + nk]: tokens of each block."""
        return np.concatenate([axis.lengths for axis in self.axes])

    @functools.lru_cache(maxsize=8)  # noqa: B019  bounded, and of few objects
    def places(self, side: int, rank: int, device: torch.device) -> _OwnBlocks:
        """The rank's blocks, complete ones first. side: 0 for q, 1 for k"""
        axis, offset = self.axes[side], side * len(self.axes[0])
        mine = np.flatnonzero(self.layout.rank[self.token_permutation] == rank)
        whole, parts = (kind[rank] - offset for kind in (self.complete, self.straddling))
        whole, parts = (kind[(kind >= 0) & (kind < len(axis))] for kind in (whole, parts))
        own = np.concatenate([whole, parts])
        number = np.zeros(len(axis), dtype=np.int64)
        number[own] = np.arange(len(own))
        block = number[axis.block_of[mine]]
        order = np.argsort(block, kind="stable")
        first = np.searchsorted(block[order], np.arange(len(own) + 1))
        place = self.layout.local[self.token_permutation[mine[order]]]
        blocks = to_device(place, device), to_device(first, device), block_runs(np.diff(first))
        return _OwnBlocks(blocks, to_device(axis.lengths[whole], device))

    @functools.lru_cache(maxsize=8)  # noqa: B019  bounded, and of few objects
    def arrivals(self, copies: int, device: torch.device) -> tuple[torch.Tensor, ...]:
        """What becomes of the rows that arrive: rank after rank, `copies` heads and samples, a rank's blocks.

        returns: int64[copies · blocks], the complete row of every block; int64[straddling rows], into which of the
                 `copies` · straddling blocks each is added up; int64, the blocks that straddle, and their lengths
        """
        split = np.unique(np.concatenate(self.straddling))
        order = np.zeros((copies, len(self.lengths)), dtype=np.int64)
        copy, into, seen = np.arange(copies)[:, None], [], 0
        for whole, parts in zip(self.complete, self.straddling, strict=True):
            order[:, whole] = seen + copy * len(whole) + np.arange(len(whole))
            into.append((copy * len(split) + np.searchsorted(split, parts)).ravel())
            seen += copies * len(whole)
        return tuple(
            to_device(array, device) for array in (order.ravel(), np.concatenate(into), split, self.lengths[split])
        )


def exchange_heads(
    rows: torch.Tensor, shares: Sequence[int], blocks: Sequence[int], group: SequenceGroup
) -> torch.Tensor:
    """Sends each rank the rows of its heads. Collective, unless no rank has any.

    rows:    [H, B, this rank's blocks, W];  shares: heads by rank;  blocks: of each rank
    returns: [n, W], by source rank [Hs, B, that rank's blocks]
    """
    _, batch, own, width = rows.shape
    if not any(blocks):
        return rows.view(-1, width)
    received = [shares[group.rank] * batch * count for count in blocks]
    return group.all_to_all(rows.view(-1, width), received, [share * batch * own for share in shares])
