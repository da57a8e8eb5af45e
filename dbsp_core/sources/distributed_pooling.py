"""Pooled queries and keys from all ranks' tokens, each head's on one rank, before any query or key itself travels.

A block that lies whole on one rank is sent as its mean and similarity; of one cut between ranks each sends its sums.
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
from dbsp_kernels.packing.row_bits import pack_bits

__all__ = ["Pooled", "assigned_heads", "gather_bits", "pool", "pool_own_heads", "traffic"]


@dataclass(frozen=True, eq=False)
class Pooled:
    """mean: float32[..., blocks, D];  similarity: float32[..., blocks], the mean cosine of all pairs of tokens"""

    mean: torch.Tensor
    similarity: torch.Tensor

    def of(self, item: int, head: int) -> Pooled:
        """Of one head of one batch item."""
        return Pooled(self.mean[item, head], self.similarity[item, head])


def pool(values: torch.Tensor, directions: torch.Tensor, lengths: torch.Tensor) -> Pooled:
    """Of whole blocks. values, directions: int64[..., blocks, D], as `sum_tokens` gives them;  lengths: int64[blocks]

    The mean cosine of all pairs of n directions, each with itself included, is |Σ directions|² / n².
    """
    mean = values.double() * MEAN_UNIT / lengths[:, None]
    direction = directions.double() * DIRECTION_UNIT / lengths[:, None]
    return Pooled(mean.float(), halving_sum(direction * direction).float())


def assigned_heads(rank: int, heads: int, ranks: int) -> np.ndarray:
    """The heads whose masks `rank` decides: even runs. int64"""
    return np.flatnonzero(contiguous_heads(heads, ranks) == rank)


def pool_own_heads(tokens: LocalQK, grid: BlockGrid) -> tuple[Pooled, Pooled]:
    """q and k of the heads whose masks this rank decides, pooled over all ranks. Collective.

    returns: of q and of k, mean float32[B, Hs, blocks, D] and similarity float32[B, Hs, blocks]
    """
    group = tokens.group
    shared = [_Sharing.of(tokens.home, grid, side) for side in ("q", "k")]
    rows = [s.pool(tensor, group.rank) for s, tensor in zip(shared, (tokens.q, tokens.k), strict=True)]
    whole = _exchange_pooled([r[0] for r in rows], [s.whole for s in shared], group)
    cut = _exchange_pooled([r[1] for r in rows], [s.cut for s in shared], group)
    q, k = (s.assemble(w, c) for s, w, c in zip(shared, whole, cut, strict=True))
    return q, k


def gather_bits(mine: torch.Tensor, heads: int, group: SequenceGroup) -> torch.Tensor:
    """Every rank's heads' bits, packed eight to a byte on the way. Collective.

    mine: bool[B, Hs, nq, nk] of `assigned_heads(rank)`;  returns: bool[B, heads, nq, nk]
    """
    most = -(-heads // group.size)
    padded = mine.new_zeros(len(mine), most, *mine.shape[2:])
    padded[:, : mine.shape[1]] = mine
    shares = [
        _unpack(packed, padded.numel()).view(padded.shape)
        for packed in group.all_gather(pack_bits(padded.view(1, -1))[0])
    ]
    return torch.cat(
        [bits[:, : len(assigned_heads(rank, heads, group.size))] for rank, bits in enumerate(shares)], dim=1
    )


def traffic(home: SequenceLayout, grid: BlockGrid, heads: int, width: int, batch: int = 1) -> int:
    """Bytes that the busiest rank receives for one mask: pooled blocks of its heads, and the other heads' bits."""
    most, others = -(-heads // home.world), home.world - 1
    sides = [_Sharing.of(home, grid, side) for side in ("q", "k")]
    whole = sum(len(blocks) for side in sides for blocks in side.whole) * 4 * (width + 1)
    cut = sum(len(blocks) for side in sides for blocks in side.cut) * 16 * width
    bits = -(-batch * most * grid.nq * grid.nk // 8)
    return batch * most * (whole + cut) * others // home.world + others * bits


@dataclass(frozen=True, eq=False)
class _Sharing:
    """How the blocks of queries or of keys lie over the ranks.

    whole, cut: by rank, int64, the blocks that it has all tokens of, and those that it has some of
    """

    home: SequenceLayout
    axis: BlockAxis
    token_permutation: np.ndarray
    whole: tuple[np.ndarray, ...]
    cut: tuple[np.ndarray, ...]

    @classmethod
    @functools.lru_cache(maxsize=8)  # the same at every attention of a video size
    def of(cls, home: SequenceLayout, grid: BlockGrid, side: str) -> _Sharing:
        axis = grid.q_axis if side == "q" else grid.k_axis
        token_permutation = grid.token_permutation(grid.common_order or CANONICAL)
        tokens = np.zeros((home.world, len(axis)), dtype=np.int64)
        np.add.at(tokens, (home.rank[token_permutation], axis.block_of), 1)
        whole = tuple(np.flatnonzero(mine == axis.lengths) for mine in tokens)
        cut = tuple(np.flatnonzero((mine > 0) & (mine < axis.lengths)) for mine in tokens)
        return cls(home, axis, token_permutation, whole, cut)

    @functools.lru_cache(maxsize=8)  # noqa: B019  bounded, and of few objects
    def places(self, rank: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """For `sum_tokens`: places of the rank's tokens, whole blocks first, and where each block's begin."""
        mine = np.flatnonzero(self.home.rank[self.token_permutation] == rank)
        block = self.axis.block_of[mine]
        own = np.concatenate([self.whole[rank], self.cut[rank]])
        number = np.zeros(len(self.axis), dtype=np.int64)
        number[own] = np.arange(len(own))
        order = np.argsort(number[block], kind="stable")
        first = np.searchsorted(number[block][order], np.arange(len(own) + 1))
        place = self.home.local[self.token_permutation[mine[order]]]
        return to_device(place, device), to_device(first, device)

    def pool(self, tokens: torch.Tensor, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        """float32[B, H, own whole blocks, D + 1], means and similarities; int64[B, H, own cut blocks, 2·D], sums."""
        values, directions = sum_tokens(tokens, *self.places(rank, tokens.device))
        complete = len(self.whole[rank])
        whole = self._rows(values[:, :, :complete], directions[:, :, :complete], self.whole[rank])
        return whole, torch.cat([values[:, :, complete:], directions[:, :, complete:]], dim=-1)

    def assemble(self, whole: Sequence[torch.Tensor], cut: Sequence[torch.Tensor]) -> Pooled:
        """All blocks of this rank's heads. whole, cut: what every rank sent, by rank"""
        batch, heads, _, width = whole[0].shape
        rows = whole[0].new_zeros(batch, heads, len(self.axis), width)
        for blocks, part in zip(self.whole, whole, strict=True):
            rows[:, :, to_device(blocks, rows.device)] = part
        shared = np.unique(np.concatenate(self.cut))
        if len(shared):
            sums = cut[0].new_zeros(batch, heads, len(shared), cut[0].shape[-1])
            for blocks, part in zip(self.cut, cut, strict=True):
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
    parts = [side.split(shares, dim=1) for side in rows]
    sent = torch.cat([part[rank].reshape(-1, width) for rank in ranks for part in parts])
    send = [batch * share * sum(side[group.rank] for side in counts) for share in shares]
    pieces = [batch * mine * side[rank] for rank in ranks for side in counts]
    receive = [sum(pieces[rank * len(rows) : (rank + 1) * len(rows)]) for rank in ranks]
    received = group.all_to_all(sent, receive, send).split(pieces)
    return [
        [received[rank * len(rows) + side].view(batch, mine, counts[side][rank], width) for rank in ranks]
        for side in range(len(rows))
    ]


def _unpack(packed: torch.Tensor, count: int) -> torch.Tensor:
    """bool[count] of what `pack_bits` packed as one row."""
    place = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return (packed[:, None] >> place & 1).bool().reshape(-1)[:count]
