"""Pooled queries and keys from all ranks' tokens, each head's on one rank, before any query or key itself travels.

A block that is complete on one rank is sent as its mean and similarity; of one that straddles ranks each sends sums.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from dbsp_core.comm.groups import SequenceGroup
from dbsp_core.layout.sequence_layout import SequenceLayout
from dbsp_core.masks.grid import BlockAxis, BlockGrid
from dbsp_core.masks.token_order import CANONICAL
from dbsp_core.planning.baselines import contiguous_heads
from dbsp_core.sources.base import LocalQK
from dbsp_kernels.packing.h2d import to_device
from dbsp_kernels.packing.pooling import DIRECTION_UNIT, MEAN_UNIT, halving_sum, sum_tokens
from dbsp_kernels.packing.row_bits import pack_bits, unpack_bits

__all__ = ["Pooled", "assigned_heads", "gather_bits", "pool", "pool_own_heads", "traffic"]


@dataclass(frozen=True, eq=False)
class Pooled:
    """mean: float32[..., blocks, D];  similarity: float32[..., blocks], the mean cosine of all pairs of tokens"""

    mean: torch.Tensor
    similarity: torch.Tensor

    def of(self, sample: int, head: int) -> Pooled:
        """Of one head of one sample of the batch."""
        return Pooled(self.mean[sample, head], self.similarity[sample, head])


def pool(values: torch.Tensor, directions: torch.Tensor, lengths: torch.Tensor) -> Pooled:
    """Of complete blocks. values, directions: int64[..., blocks, D], from `sum_tokens`;  lengths: int64[blocks]

    The mean cosine of all pairs of n directions, each with itself included, is |Σ directions|² / n².
    """
    mean = values.double() * MEAN_UNIT / lengths[:, None]
    direction = directions.double() * DIRECTION_UNIT / lengths[:, None]
    return Pooled(mean.float(), halving_sum(direction * direction).float())


def assigned_heads(rank: int, heads: int, ranks: int) -> np.ndarray:
    """The heads whose masks `rank` predicts: even runs. int64"""
    return np.flatnonzero(contiguous_heads(heads, ranks) == rank)


def pool_own_heads(tokens: LocalQK, grid: BlockGrid) -> tuple[Pooled, Pooled]:
    """q and k of the heads whose masks this rank predicts, pooled over all ranks. Collective.

    returns: of q and of k, mean float32[B, Hs, blocks, D] and similarity float32[B, Hs, blocks]
    """
    group = tokens.group
    sides = [_ShardedBlocks.of(tokens.layout, grid, side) for side in ("q", "k")]
    # 1. Each rank pools its own tokens of all heads: complete blocks to means, straddling ones to integer sums.
    rows = [side.pool(tensor, group.rank) for side, tensor in zip(sides, (tokens.q, tokens.k), strict=True)]
    # 2. Rows travel to the rank that predicts their head, q's and k's in one exchange of either kind.
    complete = _exchange_pooled([row[0] for row in rows], [side.complete for side in sides], group)
    straddling = _exchange_pooled([row[1] for row in rows], [side.straddling for side in sides], group)
    # 3. There means take their blocks' places, and sums of straddling blocks are added up and become means.
    q, k = (side.assemble(*parts) for side, *parts in zip(sides, complete, straddling, strict=True))
    return q, k


def gather_bits(mine: torch.Tensor, heads: int, group: SequenceGroup) -> torch.Tensor:
    """Every rank's heads' bits, packed eight to a byte on the way. Collective.

    mine: bool[B, Hs, nq, nk] of `assigned_heads(rank)`;  returns: bool[B, heads, nq, nk]
    """
    # 1. Ranks send equally many heads, the last ones of some being padding.
    padded = mine.new_zeros(len(mine), -(-heads // group.size), *mine.shape[2:])
    padded[:, : mine.shape[1]] = mine
    shares = group.all_gather(pack_bits(padded.view(1, -1))[0])
    # 2. Bits are unpacked and the padding is dropped.
    bits = [unpack_bits(packed, padded.numel()).view(padded.shape) for packed in shares]
    sizes = (len(assigned_heads(rank, heads, group.size)) for rank in range(group.size))
    return torch.cat([of_rank[:, :size] for of_rank, size in zip(bits, sizes, strict=True)], dim=1)


def traffic(layout: SequenceLayout, grid: BlockGrid, heads: int, width: int, batch: int = 1) -> int:
    """Bytes that the busiest rank receives for one mask: pooled blocks of its heads, and the other heads' bits."""
    most, others = -(-heads // layout.world), layout.world - 1
    sides = [_ShardedBlocks.of(layout, grid, side) for side in ("q", "k")]
    complete = sum(len(blocks) for side in sides for blocks in side.complete) * 4 * (width + 1)
    straddling = sum(len(blocks) for side in sides for blocks in side.straddling) * 16 * width
    bits = -(-batch * most * grid.nq * grid.nk // 8)
    return batch * most * (complete + straddling) * others // layout.world + others * bits


@dataclass(frozen=True, eq=False)
class _ShardedBlocks:
    """How the blocks of queries or of keys are distributed over the ranks.

    token_permutation: int64[tokens], the tokens in the order of the blocks
    complete:   by rank, int64, the blocks that it has all tokens of
    straddling: by rank, int64, the blocks that it has some tokens of
    """

    layout: SequenceLayout
    axis: BlockAxis
    token_permutation: np.ndarray
    complete: tuple[np.ndarray, ...]
    straddling: tuple[np.ndarray, ...]

    @classmethod
    @functools.lru_cache(maxsize=8)  # the same at every attention of a video size
    def of(cls, layout: SequenceLayout, grid: BlockGrid, side: str) -> _ShardedBlocks:
        axis = grid.q_axis if side == "q" else grid.k_axis
        permutation = grid.token_permutation(grid.common_order or CANONICAL)
        tokens = np.zeros((layout.world, len(axis)), dtype=np.int64)
        np.add.at(tokens, (layout.rank[permutation], axis.block_of), 1)
        complete = tuple(np.flatnonzero(mine == axis.lengths) for mine in tokens)
        straddling = tuple(np.flatnonzero((mine > 0) & (mine < axis.lengths)) for mine in tokens)
        return cls(layout, axis, permutation, complete, straddling)

    @functools.lru_cache(maxsize=8)  # noqa: B019  bounded, and of few objects
    def places(self, rank: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """For `sum_tokens`: places of the rank's tokens, complete blocks first, and where each block's begin."""
        mine = np.flatnonzero(self.layout.rank[self.token_permutation] == rank)
        own = np.concatenate([self.complete[rank], self.straddling[rank]])
        number = np.zeros(len(self.axis), dtype=np.int64)
        number[own] = np.arange(len(own))
        block = number[self.axis.block_of[mine]]
        order = np.argsort(block, kind="stable")
        first = np.searchsorted(block[order], np.arange(len(own) + 1))
        place = self.layout.local[self.token_permutation[mine[order]]]
        return to_device(place, device), to_device(first, device)

    def pool(self, tokens: torch.Tensor, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Means and similarities, float32[B, H, complete blocks, D + 1]; sums, int64[B, H, straddling blocks, 2·D]."""
        values, directions = sum_tokens(tokens, *self.places(rank, tokens.device))
        count = len(self.complete[rank])
        rows = self._rows(values[:, :, :count], directions[:, :, :count], self.complete[rank])
        return rows, torch.cat([values[:, :, count:], directions[:, :, count:]], dim=-1)

    def assemble(self, complete: Sequence[torch.Tensor], straddling: Sequence[torch.Tensor]) -> Pooled:
        """All blocks of this rank's heads. complete, straddling: what every rank sent, by rank"""
        batch, heads, _, width = complete[0].shape
        rows = complete[0].new_zeros(batch, heads, len(self.axis), width)
        for blocks, part in zip(self.complete, complete, strict=True):
            rows[:, :, to_device(blocks, rows.device)] = part
        shared = np.unique(np.concatenate(self.straddling))
        if len(shared):
            sums = straddling[0].new_zeros(batch, heads, len(shared), straddling[0].shape[-1])
            for blocks, part in zip(self.straddling, straddling, strict=True):
                sums.index_add_(2, to_device(np.searchsorted(shared, blocks), sums.device), part)
            values, directions = sums.chunk(2, dim=-1)
            rows[:, :, to_device(shared, rows.device)] = self._rows(values, directions, shared)
        return Pooled(rows[..., :-1], rows[..., -1])

    def _rows(self, values: torch.Tensor, directions: torch.Tensor, blocks: np.ndarray) -> torch.Tensor:
        """float32[..., D + 1]: means and similarities of these blocks."""
        pooled = pool(values, directions, to_device(self.axis.lengths[blocks], values.device))
        return torch.cat([pooled.mean, pooled.similarity[..., None]], dim=-1)


def _exchange_pooled(
    rows: Sequence[torch.Tensor], blocks: Sequence[tuple[np.ndarray, ...]], group: SequenceGroup
) -> list[list[torch.Tensor]]:
    """Sends each rank the rows of its heads, q's and k's in one exchange. Collective.

    rows:    per side, [B, H, this rank's blocks, W]
    blocks:  per side, by rank, its blocks
    returns: per side, by source rank, [B, Hs, that rank's blocks, W]
    """
    batch, heads, _, width = rows[0].shape
    ranks = range(group.size)
    shares = [len(assigned_heads(rank, heads, group.size)) for rank in ranks]
    counts = [[len(of_rank) for of_rank in side] for side in blocks]
    mine = shares[group.rank]
    if not any(map(sum, counts)):
        return [[side[:, :mine] for _ in ranks] for side in rows]
    # 1. What is sent: rank after rank, q's rows of that rank's heads, then k's.
    parts = [side.split(shares, dim=1) for side in rows]
    sent = torch.cat([part[rank].reshape(-1, width) for rank in ranks for part in parts])
    send_splits = [batch * share * sum(side[group.rank] for side in counts) for share in shares]
    # 2. What is received: rank after rank, q's rows of this rank's heads, then k's.
    pieces = [batch * mine * side[rank] for rank in ranks for side in counts]
    recv_splits = [sum(pieces[rank * len(rows) : (rank + 1) * len(rows)]) for rank in ranks]
    received = group.all_to_all(sent, recv_splits, send_splits).split(pieces)
    # 3. By side and source rank, as it was packed.
    return [
        [received[rank * len(rows) + side].view(batch, mine, counts[side][rank], width) for rank in ranks]
        for side in range(len(rows))
    ]
