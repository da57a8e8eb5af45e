"""Means over all ranks' tokens: per block, sent to the rank that predicts a head's mask, or over all tokens.

A block that lies on one rank is sent as its mean and similarity; for a block that straddles ranks, each sends sums.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from dbsp_core.comm.groups import SequenceGroup
from dbsp_core.layout.sequence_layout import SequenceLayout
from dbsp_core.masks.grid import CANONICAL, BlockAxis, BlockGrid
from dbsp_kernels.prediction import pool_rows, sum_tokens
from dbsp_kernels.rounding import MEAN_UNIT
from dbsp_kernels.segments import to_device

ROWS_OF_SUMS = 4
"""Size of a block's sums, in rows of its mean."""

SUMMED_AT_ONCE = 256
"""Tokens per partial sum of the mean over all tokens, small enough to keep all multiprocessors busy."""


def pool_heads(
    tensors: Sequence[torch.Tensor],
    blocks: ShardedBlocks,
    shares: Sequence[int],
    group: SequenceGroup,
) -> torch.Tensor:
    """Pools the blocks of all ranks, and returns the heads that this rank asked for. Collective.

    `tensors` are this rank's tokens, [B, H, n_local, D], such as q and k; `shares` the numbers of heads that each rank
    asks for. Returns float32[Hs, B, n, D + 1], mean and similarity of every block, concatenated over `tensors`.
    """
    device, (batch, heads, _, head_dim) = tensors[0].device, tensors[0].shape
    complete, straddling = len(blocks.complete[group.rank]), len(blocks.straddling[group.rank])
    # 1. Sum this rank's tokens of all heads: complete blocks become means, straddling blocks stay integer sums
    sums = tensors[0].new_empty(heads, batch, complete + straddling, 2 * head_dim + 2, dtype=torch.int64)
    for side, tensor in enumerate(tensors):
        slots, first, rows_of_blocks = blocks.positions(side, group.rank, device)
        sum_tokens(tensor, slots, first, sums, rows_of_blocks)
    sent = pool_rows(sums[:, :, :complete], blocks.complete_lengths(group.rank, device)).view(torch.int32)
    # 2. Send them to the ranks that asked for their head, in one exchange of rows of D + 1 32-bit words
    if straddling:
        rows_of_sums = sums.view(torch.int32).view(heads, batch, -1, head_dim + 1)[:, :, ROWS_OF_SUMS * complete :]
        sent = torch.cat([sent, rows_of_sums], dim=2)
    arrived = exchange_heads(sent, shares, blocks.rows, group)
    # 3. Write means to their blocks' slots; add up the sums of straddling blocks and divide
    copies, lengths = shares[group.rank] * batch, blocks.lengths
    order_of_rows, parts, into, split, of_split = blocks.arrivals(copies, device)
    rows = arrived.index_select(0, order_of_rows).view(torch.float32)
    rows = rows.view(shares[group.rank], batch, len(lengths), head_dim + 1)
    if split.shape[0]:
        part_sums = arrived.index_select(0, parts).view(-1, ROWS_OF_SUMS * (head_dim + 1)).view(torch.int64)
        added = part_sums.new_zeros(copies * split.shape[0], 2 * head_dim + 2).index_add_(0, into, part_sums)
        rows.index_copy_(2, split, pool_rows(added.view(*rows.shape[:2], split.shape[0], 2 * head_dim + 2), of_split))
    return rows


@dataclass(frozen=True, eq=False)
class ShardedBlocks:
    """Distribution over ranks of the blocks of several axes, such as queries and then keys."""

    layout: SequenceLayout
    axes: tuple[BlockAxis, ...]
    token_permutation: np.ndarray  # int64[tokens], tokens in block order
    complete: tuple[np.ndarray, ...]  # by rank, int64, blocks with all tokens on it
    straddling: tuple[np.ndarray, ...]  # by rank, int64, blocks with some tokens on it

    @classmethod
    @functools.lru_cache(maxsize=8)  # equal in every attention of a video size
    def from_layout(cls, layout: SequenceLayout, grid: BlockGrid, kinds: str = "qk") -> ShardedBlocks:
        """Returns the blocks of the tensors named by letters in `kinds`: "qk" or "qkv"."""
        axes = tuple(grid.q_axis if kind == "q" else grid.k_axis for kind in kinds)
        permutation = grid.token_permutation(grid.common_order or CANONICAL)
        lengths = np.concatenate([axis.lengths for axis in axes])
        tokens = np.zeros((layout.world, len(lengths)), dtype=np.int64)
        for axis, first in zip(axes, _firsts(axes), strict=True):
            np.add.at(tokens, (layout.rank[permutation], first + axis.block_of), 1)
        complete = tuple(np.flatnonzero(mine == lengths) for mine in tokens)
        straddling = tuple(np.flatnonzero((mine > 0) & (mine < lengths)) for mine in tokens)
        return cls(layout, axes, permutation, complete, straddling)

    @cached_property
    def rows(self) -> list[int]:
        """Rows of D + 1 words that each rank sends per head and sample: complete blocks', then straddling blocks'."""
        each = zip(self.complete, self.straddling, strict=True)
        return [len(whole) + ROWS_OF_SUMS * len(parts) for whole, parts in each]

    @cached_property
    def lengths(self) -> np.ndarray:
        """int64[n]: tokens of each block."""
        return np.concatenate([axis.lengths for axis in self.axes])

    @functools.lru_cache(maxsize=8)  # noqa: B019  bounded, and of few objects
    def positions(self, side: int, rank: int, device: torch.device) -> tuple[torch.Tensor, ...]:
        """Returns `position`, `first` and `rows` of `sum_tokens` for a rank's blocks of one axis.

        Rows are ordered by complete blocks of all axes, then straddling blocks.
        """
        axis, offset = self.axes[side], _firsts(self.axes)[side]
        mine = np.flatnonzero(self.layout.rank[self.token_permutation] == rank)
        whole, parts = (kind[rank] - offset for kind in (self.complete, self.straddling))
        whole, parts = (kind[(kind >= 0) & (kind < len(axis))] for kind in (whole, parts))
        mine_in_axis = np.concatenate([whole, parts])
        number = np.zeros(len(axis), dtype=np.int64)
        number[mine_in_axis] = np.arange(len(mine_in_axis))
        block = number[axis.block_of[mine]]
        order = np.argsort(block, kind="stable")
        first = np.searchsorted(block[order], np.arange(len(mine_in_axis) + 1))
        slot = self.layout.local[self.token_permutation[mine[order]]]
        row = np.searchsorted(self.complete[rank], whole + offset)
        row_of_part = len(self.complete[rank]) + np.searchsorted(self.straddling[rank], parts + offset)
        return tuple(to_device(array, device) for array in (slot, first, np.concatenate([row, row_of_part])))

    @functools.lru_cache(maxsize=8)  # noqa: B019  bounded, and of few objects
    def complete_lengths(self, rank: int, device: torch.device) -> torch.Tensor:
        """Returns int64, the number of tokens of each complete block of a rank."""
        return to_device(self.lengths[self.complete[rank]], device)

    @functools.lru_cache(maxsize=8)  # noqa: B019  bounded, and of few objects
    def arrivals(self, copies: int, device: torch.device) -> tuple[torch.Tensor, ...]:
        """Returns the slots of received rows, ordered by source rank, head and sample (`copies`), and block.

        They are int64[copies · blocks], row of every complete block (0 for others); int64[n · ROWS_OF_SUMS], rows of n
        sums; int64[n], which of `copies` · straddling blocks each sum is of; the straddling blocks and their lengths.
        """
        split = np.unique(np.concatenate(self.straddling))
        order = np.zeros((copies, len(self.lengths)), dtype=np.int64)
        copy, sums, into, seen = np.arange(copies)[:, None], [], [], 0
        for whole, parts, rows in zip(self.complete, self.straddling, self.rows, strict=True):
            first = seen + copy * rows
            order[:, whole] = first + np.arange(len(whole))
            sums.append((first + np.arange(len(whole), rows)).ravel())
            into.append((copy * len(split) + np.searchsorted(split, parts)).ravel())
            seen += copies * rows
        arrays = order.ravel(), np.concatenate(sums), np.concatenate(into), split, self.lengths[split]
        return tuple(to_device(array, device) for array in arrays)


def _firsts(axes: Sequence[BlockAxis]) -> list[int]:
    """Returns the index of each axis's first block."""
    return [sum(map(len, axes[:slot])) for slot in range(len(axes))]


def exchange_heads(
    rows: torch.Tensor, shares: Sequence[int], blocks: Sequence[int], group: SequenceGroup
) -> torch.Tensor:
    """Sends each rank the rows of its heads: [H, B, this rank's blocks, W] → [n, W]. Collective unless all are empty.

    `shares` and `blocks` are the numbers of heads and of blocks by rank. The result has [Hs, B, blocks] of each source
    rank, concatenated.
    """
    _, batch, local_blocks, head_dim = rows.shape
    if not any(blocks):
        return rows.view(-1, head_dim)
    received = [shares[group.rank] * batch * count for count in blocks]
    return group.all_to_all(rows.view(-1, head_dim), received, [share * batch * local_blocks for share in shares])


def mean_of_tokens(tokens: torch.Tensor, layout: SequenceLayout, group: SequenceGroup) -> torch.Tensor:
    """Returns the mean over all tokens, float32[B, H, D], from each rank's [B, H, n_local, D]. Collective.

    Padding is excluded. Sums are integers, so the order and number of ranks do not matter; `sum_tokens` describes
    values that are not finite or exceed 2^15.
    """
    local_tokens = _own_tokens(layout, group.rank, tokens.device)
    head_dim = tokens.shape[-1]
    sums = sum_tokens(tokens, *local_tokens)[..., :head_dim].sum(dim=2)  # [H, B, D]
    gathered = group.all_gather_along(sums[None].contiguous()).sum(dim=0)
    mean = gathered.to(torch.float64) / (layout.tokens / MEAN_UNIT)  # one rounding: the divisor is exact
    return mean.to(torch.float32).transpose(0, 1).contiguous()


def mean_bytes(batch: int, heads: int, head_dim: int, ranks: int) -> int:
    """Returns the bytes that a rank sends to others for one mean."""
    return 8 * batch * heads * head_dim * (ranks - 1)


@functools.lru_cache(maxsize=8)  # equal in every attention of a video size
def _own_tokens(layout: SequenceLayout, rank: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns `position` and `first` of `sum_tokens` for the rank's slots with a token, in blocks."""
    target = layout.tokens_at(rank)[1]
    first = np.append(np.arange(0, len(target), SUMMED_AT_ONCE), len(target))
    return to_device(target, device), to_device(first, device)
