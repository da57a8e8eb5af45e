"""Predicted masks, each head on one rank: what that needs from all ranks before any query or key travels."""

from __future__ import annotations

import functools

import numpy as np
import torch

from dbsp_core.comm.block_pooling import ShardedBlocks, pool_heads
from dbsp_core.comm.groups import SequenceGroup
from dbsp_core.layout.sequence_layout import SequenceLayout
from dbsp_core.masks.grid import BlockGrid
from dbsp_core.planning.baselines import contiguous_heads
from dbsp_core.sources.base import LocalQK
from dbsp_kernels.packing.h2d import to_device
from dbsp_kernels.packing.row_bits import unpack_bits

__all__ = ["assigned_heads", "gather_bits", "pool_own_heads", "traffic"]


def assigned_heads(rank: int, heads: int, ranks: int) -> np.ndarray:
    """The heads whose masks `rank` predicts, int64: even runs."""
    return np.flatnonzero(contiguous_heads(heads, ranks) == rank)


def pool_own_heads(tokens: LocalQK, grid: BlockGrid) -> torch.Tensor:
    """Pools the q and k of the heads whose masks this rank predicts over all ranks. Collective.

    Returns:
        float32[Hs, B, nq + nk, D + 1], the mean and similarity of every query block and then of every key block.
    """
    ranks = range(tokens.group.size)
    heads_of = [assigned_heads(rank, tokens.q.shape[1], tokens.group.size) for rank in ranks]
    return pool_heads((tokens.q, tokens.k), ShardedBlocks.of(tokens.layout, grid), heads_of, tokens.group)


def gather_bits(mine: torch.Tensor, heads: int, batch: int, columns: int, group: SequenceGroup) -> torch.Tensor:
    """Gathers the bits of all heads, bool[B · heads, nq, columns]. Collective.

    `mine` is uint8[Hs · B, nq, ceil(columns / 8)] from `pack_bits`, the bits of `assigned_heads(rank)`.
    """
    # 1. Ranks send equally many heads, the last ones of some being padding.
    most = -(-heads // group.size) * batch
    padded = mine if len(mine) == most else mine.new_empty(most, *mine.shape[1:])
    if padded is not mine:
        padded[: len(mine)] = mine
    everyone = group.all_gather_along(padded)
    # 2. Heads take their places without padding, where they are not there already, and bits are unpacked.
    if batch > 1 or heads % group.size:
        everyone = everyone.index_select(0, _gathered_heads(heads, batch, group.size, mine.device))
    return unpack_bits(everyone, columns)


@functools.lru_cache(maxsize=8)
def _gathered_heads(heads: int, batch: int, ranks: int, device: torch.device) -> torch.Tensor:
    """int64[B · heads]: places of each sample's heads in what all ranks gathered."""
    most = -(-heads // ranks)
    places = np.concatenate(
        [rank * most + np.arange(len(assigned_heads(rank, heads, ranks))) for rank in range(ranks)]
    )
    return to_device((places * batch + np.arange(batch)[:, None]).ravel(), device)


def traffic(layout: SequenceLayout, grid: BlockGrid, heads: int, width: int, batch: int = 1) -> int:
    """Bytes that the busiest rank receives for one mask: pooled blocks of its heads, and bits of other heads."""
    most, others = -(-heads // layout.world), layout.world - 1
    blocks = ShardedBlocks.of(layout, grid)
    pooled = sum(blocks.rows) * 4 * (width + 1)
    bits = batch * most * grid.nq * -(-grid.nk // 8)
    return batch * most * pooled * others // layout.world + others * bits
