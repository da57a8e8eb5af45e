"""Prediction of masks with each head on one rank, and the exchanges for it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from dbsp_core.comm.block_pooling import ShardedBlocks, pool_heads
from dbsp_core.comm.groups import SequenceGroup
from dbsp_core.layout.sequence_layout import SequenceLayout
from dbsp_core.masks.grid import CANONICAL, BlockGrid
from dbsp_core.planning.planners import contiguous_heads
from dbsp_core.sources.base import LocalQK
from dbsp_kernels.segments import to_device
from dbsp_kernels.tables import unpack_bits

PAIRS_AT_ONCE = {"cpu": 1 << 20, "cuda": 1 << 24}
"""Block pairs selected at a time, to limit memory: the CPU takes 50 bytes per pair."""


@functools.lru_cache(maxsize=8)
def heads_by_rank(heads: int, ranks: int) -> tuple[int, ...]:
    """Returns the number of heads that each rank predicts, in even runs."""
    return tuple(np.bincount(contiguous_heads(heads, ranks), minlength=ranks).tolist())


def pool_own_heads(tokens: LocalQK, grid: BlockGrid, values: torch.Tensor | None = None) -> torch.Tensor:
    """Pools q and k (and values, unless None) of all ranks, for the heads that this rank predicts. Collective.

    Returns float32[Hs · B, nq + nk, D + 1], mean and similarity of every query block, then every key block; with
    values nq + 2·nk blocks.
    """
    shares = heads_by_rank(tokens.q.shape[1], tokens.group.size)
    tensors = [tokens.q, tokens.k] if values is None else [tokens.q, tokens.k, values]
    blocks = ShardedBlocks.from_layout(tokens.layout, grid, "qkv"[: len(tensors)])
    return pool_heads(tensors, blocks, shares, tokens.group).flatten(0, 1)


def predict_bits(
    rows: torch.Tensor, choose: Callable[[torch.Tensor], torch.Tensor], tokens: LocalQK, grid: BlockGrid
) -> torch.Tensor:
    """Selects the blocks of this rank's heads, and gathers all heads' bits bool[B · heads, nq, nk]. Collective.

    `rows` [Hs · B, ...] are pooled inputs of the heads that this rank predicts. `choose` maps rows of some heads to
    bits uint8[heads, nq, ceil(nk / 8)] (see `pack_bits`); it is called with few heads at a time to limit memory, and
    the result for a head must not depend on the others.
    """
    (batch, heads), group = tokens.q.shape[:2], tokens.group
    # 1. Select blocks of this rank's heads → uint8[Hs · B, nq, ceil(nk / 8)]
    together = max(1, PAIRS_AT_ONCE["cuda" if rows.is_cuda else "cpu"] // (grid.nq * grid.nk))
    parts = [choose(some) for some in rows.split(together)] if rows.shape[0] > together else [choose(rows)]
    mine = parts[0] if len(parts) == 1 else torch.cat(parts)
    # 2. Gather, padded to equal numbers of heads per rank
    most = -(-heads // group.size) * batch
    padded = mine if mine.shape[0] == most else mine.new_empty(most, *mine.shape[1:])
    if padded is not mine:
        padded[: len(mine)] = mine
    gathered = group.all_gather_along(padded)
    # 3. Reorder heads if needed, and unpack bits
    if batch > 1 or heads % group.size:
        gathered = gathered.index_select(0, _gathered_heads(heads, batch, group.size, mine.device))
    return unpack_bits(gathered, grid.nk)


@functools.lru_cache(maxsize=8)
def _gathered_heads(heads: int, batch: int, ranks: int, device: torch.device) -> torch.Tensor:
    """Returns positions of each sample's heads in the gathered tensor, int64[B · heads]."""
    most = -(-heads // ranks)
    positions = np.concatenate(
        [rank * most + np.arange(count) for rank, count in enumerate(heads_by_rank(heads, ranks))]
    )
    return to_device((positions * batch + np.arange(batch)[:, None]).ravel(), device)


class LocalBlocks(NamedTuple):
    """The query blocks with tokens on each rank."""

    of_ranks: tuple[np.ndarray, ...]  # by rank, int64
    block: torch.Tensor  # int64[n_local], index of each slot's block among this rank's; 0 at padding
    real: torch.Tensor  # bool[n_local], False at padding

    @classmethod
    @functools.lru_cache(maxsize=8)  # equal in every attention of a video size
    def from_layout(
        cls, layout: SequenceLayout, grid: BlockGrid, rank: int, n_local: int, device: torch.device
    ) -> LocalBlocks:
        block_of = np.empty(grid.tokens, dtype=np.int64)
        block_of[grid.token_permutation(grid.common_order or CANONICAL)] = grid.q_axis.block_of
        of_ranks = tuple(np.unique(block_of[layout.tokens_at(other_rank)[0]]) for other_rank in range(layout.world))
        tokens, positions = layout.tokens_at(rank)
        block, real = np.zeros(n_local, dtype=np.int64), np.zeros(n_local, dtype=bool)
        block[positions], real[positions] = np.searchsorted(of_ranks[rank], block_of[tokens]), True
        return cls(of_ranks, to_device(block, device), to_device(real, device))


def send_to_sources(mine: torch.Tensor, heads: int, blocks: LocalBlocks, group: SequenceGroup) -> torch.Tensor:
    """Sends results per query block to the ranks with tokens of the block. Collective.

    [Hs, B, nq, D] of the heads that this rank predicts → [B · heads, n, D] of the n blocks on this rank.
    """
    heads_here, batch, _, head_dim = mine.shape
    counts = [len(of_rank) for of_rank in blocks.of_ranks]
    parts = mine.index_select(2, to_device(np.concatenate(blocks.of_ranks), mine.device)).split(counts, dim=2)
    shares = heads_by_rank(heads, group.size)
    received = [share * batch * counts[group.rank] for share in shares]
    sent = torch.cat([part.reshape(-1, head_dim) for part in parts])
    arrived = group.all_to_all(sent, received, [heads_here * batch * count for count in counts])
    return arrived.view(heads, batch, counts[group.rank], head_dim).transpose(0, 1).flatten(0, 1)
