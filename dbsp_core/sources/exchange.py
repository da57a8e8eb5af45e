"""Pooled queries and keys from all ranks' tokens, each head's on one rank, before any query or key itself travels.

A block that lies whole on one rank is sent as its mean and similarity; of one cut between ranks each sends its sums.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from dbsp_core.grid import BlockAxis, BlockGrid
from dbsp_core.groups import SequenceGroup
from dbsp_core.home import HomeLayout
from dbsp_core.partition.baselines import contiguous_heads
from dbsp_core.sources.base import HomeTokens
from dbsp_core.sources.pooling import BlockSums, Pooled, pool, sum_by_block

__all__ = ["gather_bits", "heads_of", "pool_own_heads", "traffic"]


def heads_of(rank: int, heads: int, ranks: int) -> np.ndarray:
    """The heads whose masks `rank` decides: even runs. int64"""
    return np.flatnonzero(contiguous_heads(heads, ranks) == rank)


def pool_own_heads(tokens: HomeTokens, grid: BlockGrid) -> tuple[Pooled, Pooled]:
    """q and k of the heads whose masks this rank decides, pooled over all ranks. Collective.

    returns: of q and of k, mean float32[B, Hs, blocks, D] and similarity float32[B, Hs, blocks]
    """
    standing = None if grid.common_order is None else grid.standing(grid.common_order)
    sides = tuple(
        _Side.of(tensor, tokens.home, axis, standing, tokens.group)
        for tensor, axis in ((tokens.q, grid.q_axis), (tokens.k, grid.k_axis))
    )
    whole = _to_deciders([side.whole_rows() for side in sides], tokens.group, [side.whole for side in sides])
    cut = _to_deciders([side.cut_rows() for side in sides], tokens.group, [side.cut for side in sides])
    pooled = [side.assemble(w, c) for side, w, c in zip(sides, whole, cut, strict=True)]
    return pooled[0], pooled[1]


def gather_bits(mine: torch.Tensor, heads: int, group: SequenceGroup) -> torch.Tensor:
    """Every rank's heads' bits, packed eight to a byte on the way. Collective.

    mine: bool[B, Hs, nq, nk] of `heads_of(rank)`;  returns: bool[B, heads, nq, nk]
    """
    most = -(-heads // group.size)
    padded = mine.new_zeros(len(mine), most, *mine.shape[2:])
    padded[:, : mine.shape[1]] = mine
    shares = [_unpack(packed, padded.numel()).view(padded.shape) for packed in group.all_gather(_pack(padded))]
    return torch.cat([bits[:, : len(heads_of(rank, heads, group.size))] for rank, bits in enumerate(shares)], dim=1)


def traffic(home: HomeLayout, grid: BlockGrid, heads: int, width: int, batch: int = 1) -> int:
    """Bytes that the busiest rank receives for one mask: pooled blocks of its heads, and the other heads' bits."""
    standing = None if grid.common_order is None else grid.standing(grid.common_order)
    most = -(-heads // home.world)
    received = 0
    for axis in (grid.q_axis, grid.k_axis):
        whole, cut = _blocks_by_rank(home, axis, standing)
        pieces = sum(len(blocks) for blocks in whole) * 4 * (width + 1) + sum(map(len, cut)) * 16 * width
        received += batch * most * pieces
    bits = -(-batch * most * grid.nq * grid.nk // 8)
    return received * (home.world - 1) // home.world + (home.world - 1) * bits


@dataclass(frozen=True, eq=False)
class _Side:
    """Queries or keys. whole, cut: by rank, the blocks that it has all of, and those that it shares with others."""

    sums: BlockSums
    own_whole: Pooled
    whole: tuple[np.ndarray, ...]
    cut: tuple[np.ndarray, ...]
    axis: BlockAxis
    group: SequenceGroup

    @classmethod
    def of(
        cls,
        tensor: torch.Tensor,
        home: HomeLayout,
        axis: BlockAxis,
        standing: np.ndarray | None,
        group: SequenceGroup,
    ) -> _Side:
        whole, cut = _blocks_by_rank(home, axis, standing)
        own = np.concatenate([whole[group.rank], cut[group.rank]])
        place, block = _tokens_here(home, axis, standing, group.rank)
        number = np.zeros(len(axis), dtype=np.int64)
        number[own] = np.arange(len(own))
        device = tensor.device
        here = tensor.index_select(2, torch.from_numpy(place).to(device))
        sums = sum_by_block(here, torch.from_numpy(number[block]).to(device), len(own))
        complete = len(whole[group.rank])
        lengths = torch.from_numpy(axis.lengths[whole[group.rank]]).to(device)
        ready = pool(BlockSums(sums.values[:, :, :complete], sums.directions[:, :, :complete]), lengths)
        rest = BlockSums(sums.values[:, :, complete:], sums.directions[:, :, complete:])
        return cls(rest, ready, whole, cut, axis, group)

    def whole_rows(self) -> torch.Tensor:
        """float32[B, H, own whole blocks, D + 1]: means and similarities."""
        return torch.cat([self.own_whole.mean, self.own_whole.similarity[..., None]], dim=-1)

    def cut_rows(self) -> torch.Tensor:
        """int64[B, H, own cut blocks, 2·D]: sums."""
        return torch.cat([self.sums.values, self.sums.directions], dim=-1)

    def assemble(self, whole: list[torch.Tensor], cut: list[torch.Tensor]) -> Pooled:
        """All blocks of this rank's heads. whole, cut: what every rank sent, by rank"""
        batch, heads, _, width = whole[0].shape
        rows = whole[0].new_zeros(batch, heads, len(self.axis), width)
        for blocks, part in zip(self.whole, whole, strict=True):
            rows[:, :, torch.from_numpy(blocks).to(rows.device)] = part
        shared = np.unique(np.concatenate(self.cut))
        if len(shared):
            sums = cut[0].new_zeros(batch, heads, len(shared), 2 * (width - 1))
            for blocks, part in zip(self.cut, cut, strict=True):
                sums.index_add_(2, torch.from_numpy(np.searchsorted(shared, blocks)).to(sums.device), part)
            lengths = torch.from_numpy(self.axis.lengths[shared]).to(sums.device)
            pooled = pool(BlockSums(*sums.chunk(2, dim=-1)), lengths)
            joined = torch.cat([pooled.mean, pooled.similarity[..., None]], dim=-1)
            rows[:, :, torch.from_numpy(shared).to(rows.device)] = joined
        return Pooled(rows[..., :-1], rows[..., -1])


def _blocks_by_rank(
    home: HomeLayout, axis: BlockAxis, standing: np.ndarray | None
) -> tuple[tuple[np.ndarray, ...], tuple[np.ndarray, ...]]:
    """By rank, the blocks that it has all tokens of, and those that it has some of. int64 each"""
    rank = home.rank if standing is None else home.rank[standing]
    tokens = np.zeros((home.world, len(axis)), dtype=np.int64)
    np.add.at(tokens, (rank, axis.block_of), 1)
    whole = tuple(np.flatnonzero(mine == axis.lengths) for mine in tokens)
    cut = tuple(np.flatnonzero((mine > 0) & (mine < axis.lengths)) for mine in tokens)
    return whole, cut


def _tokens_here(
    home: HomeLayout, axis: BlockAxis, standing: np.ndarray | None, rank: int
) -> tuple[np.ndarray, np.ndarray]:
    """(place, block) of this rank's tokens, int64 each."""
    token = np.arange(home.tokens) if standing is None else standing
    here = home.rank[token] == rank
    return home.local[token[here]], axis.block_of[here]


def _to_deciders(
    rows: list[torch.Tensor], group: SequenceGroup, blocks: list[tuple[np.ndarray, ...]]
) -> list[list[torch.Tensor]]:
    """Sends each rank the rows of its heads, q's and k's in one exchange.

    rows:    per side, [B, H, this rank's blocks, W]
    blocks:  per side, by rank, its blocks
    returns: per side, by source rank, [B, Hs, that rank's blocks, W]
    """
    batch, heads, _, width = rows[0].shape
    shares = [len(heads_of(rank, heads, group.size)) for rank in range(group.size)]
    counts = [[len(of_rank) for of_rank in side] for side in blocks]
    if not any(map(sum, counts)):
        return [[side[:, : shares[group.rank]] for _ in range(group.size)] for side in rows]
    parts = [side.split(shares, dim=1) for side in rows]
    sent = torch.cat([part[rank].reshape(-1, width) for rank in range(group.size) for part in parts])
    send = [batch * share * sum(side[group.rank] for side in counts) for share in shares]
    mine = batch * shares[group.rank]
    receive = [mine * sum(side[rank] for side in counts) for rank in range(group.size)]
    received = group.all_to_all(sent, receive, send).split([mine * c[r] for r in range(group.size) for c in counts])
    return [
        [
            received[rank * len(rows) + side].view(batch, shares[group.rank], counts[side][rank], width)
            for rank in range(group.size)
        ]
        for side in range(len(rows))
    ]


def _pack(bits: torch.Tensor) -> torch.Tensor:
    """uint8[ceil(n / 8)], the first bit lowest."""
    flat = torch.nn.functional.pad(bits.reshape(-1), (0, -bits.numel() % 8)).view(-1, 8)
    weight = 2 ** torch.arange(8, dtype=torch.uint8, device=bits.device)
    return (flat * weight).sum(dim=1, dtype=torch.uint8)


def _unpack(packed: torch.Tensor, count: int) -> torch.Tensor:
    """bool[count]"""
    place = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return (packed[:, None] >> place & 1).bool().reshape(-1)[:count]
