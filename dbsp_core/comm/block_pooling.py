"""Means of all ranks' tokens: of the blocks of queries, keys or values, brought to who asks for a head; and of all.

A block that is complete on one rank is sent as its mean and similarity; if it straddles ranks, each sends its sums.
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
"""Rows of a block's mean that its sums take the room of."""

SUMMED_AT_ONCE = 256
"""Tokens of the mean of all, so that a GPU has work for all of its multiprocessors."""


def pool_heads(
    tensors: Sequence[torch.Tensor],
    blocks: ShardedBlocks,
    shares: Sequence[int],
    group: SequenceGroup,
) -> torch.Tensor:
    """Pools the tokens of all ranks, and brings each rank the heads that it asks for. Collective.

    Args:
        tensors: This rank's tokens, [B, H, n_local, D], such as q and k.
        blocks: The blocks of each of them.
        shares: By rank, the number of heads it asks for, which follow those of the rank before.

    Returns:
        float32[Hs, B, n, D + 1], the mean and similarity of every block of the first, then of the second, and so on.
    """
    device, (batch, heads, _, head_dim) = tensors[0].device, tensors[0].shape
    complete, straddling = len(blocks.complete[group.rank]), len(blocks.straddling[group.rank])
    # 1. Each rank sums its tokens of all heads. Complete blocks become means, straddling ones remain integer sums.
    sums = tensors[0].new_empty(heads, batch, complete + straddling, 2 * head_dim + 2, dtype=torch.int64)
    for side, tensor in enumerate(tensors):
        slots, first, rows_of_blocks = blocks.positions(side, group.rank, device)
        sum_tokens(tensor, slots, first, sums, rows_of_blocks)
    sent = pool_rows(sums[:, :, :complete], blocks.complete_lengths(group.rank, device)).view(torch.int32)
    # 2. All are sent to the ranks that need their head, in one exchange of rows of D + 1 numbers of 32 bits.
    if straddling:
        rows_of_sums = sums.view(torch.int32).view(heads, batch, -1, head_dim + 1)[:, :, ROWS_OF_SUMS * complete :]
        sent = torch.cat([sent, rows_of_sums], dim=2)
    arrived = exchange_heads(sent, shares, blocks.rows, group)
    # 3. A rank writes means into their blocks' slots, and adds up the sums of straddling blocks to means.
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
    """The distribution of several axes' blocks over the ranks, such as those of queries, followed by those of keys."""

    layout: SequenceLayout
    axes: tuple[BlockAxis, ...]
    token_permutation: np.ndarray  # int64[tokens], the tokens in the order of the blocks
    complete: tuple[np.ndarray, ...]  # By rank, int64, the blocks of which it has all tokens
    straddling: tuple[np.ndarray, ...]  # By rank, int64, the blocks of which it has some tokens

    @classmethod
    @functools.lru_cache(maxsize=8)  # the same at every attention of a video size
    def from_layout(cls, layout: SequenceLayout, grid: BlockGrid, kinds: str = "qk") -> ShardedBlocks:
        """Returns the blocks of queries, keys and values, as `kinds` has their letters: "qk" or "qkv"."""
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
        """By rank, the rows of D + 1 numbers that it sends of each head and sample: complete blocks', then others'."""
        return [
            len(whole) + ROWS_OF_SUMS * len(parts) for whole, parts in zip(self.complete, self.straddling, strict=True)
        ]

    @cached_property
    def lengths(self) -> np.ndarray:
        """int64[n]: tokens of each block."""
        return np.concatenate([axis.lengths for axis in self.axes])

    @functools.lru_cache(maxsize=8)  # noqa: B019  bounded, and of few objects
    def positions(self, side: int, rank: int, device: torch.device) -> tuple[torch.Tensor, ...]:
        """Returns `position`, `first` and `rows` of `sum_tokens` for a rank's blocks of one axis.

        Rows are those of complete blocks of all axes, and behind them those of straddling ones.
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
        """Returns int64, the tokens of each complete block of a rank."""
        return to_device(self.lengths[self.complete[rank]], device)

    @functools.lru_cache(maxsize=8)  # noqa: B019  bounded, and of few objects
    def arrivals(self, copies: int, device: torch.device) -> tuple[torch.Tensor, ...]:
        """Returns the slots of received rows, ordered by source rank, head and sample (`copies`), and block.

        Returns:
            int64[copies · blocks], the row of every complete block, row 0 for others; int64[n · ROWS_OF_SUMS], the
            rows of n sums; int64[n], the one of `copies` · straddling blocks to which each is added; int64, the
            straddling blocks, and their lengths.
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
    """Returns the number of each axis's first block among those of all."""
    return [sum(map(len, axes[:slot])) for slot in range(len(axes))]


def exchange_heads(
    rows: torch.Tensor, shares: Sequence[int], blocks: Sequence[int], group: SequenceGroup
) -> torch.Tensor:
    """Sends each rank the rows of its heads. Collective, unless no rank has any.

    `shares` and `blocks` are the ranks' numbers of heads and of blocks. Takes [H, B, this rank's blocks, W] to [n, W],
    by source rank [Hs, B, that rank's blocks].
    """
    _, batch, local_blocks, head_dim = rows.shape
    if not any(blocks):
        return rows.view(-1, head_dim)
    received = [shares[group.rank] * batch * count for count in blocks]
    return group.all_to_all(rows.view(-1, head_dim), received, [share * batch * local_blocks for share in shares])


def mean_of_tokens(tokens: torch.Tensor, layout: SequenceLayout, group: SequenceGroup) -> torch.Tensor:
    """Returns float32[B, H, D], the mean over all tokens of a layout, from a rank's [B, H, n_local, D]. Collective.

    Padding does not count. Sums are of integers: no order, and no number of ranks, changes them. What is not finite,
    and magnitudes beyond 2^15, count as `sum_tokens` has them.
    """
    local_tokens = _own_tokens(layout, group.rank, tokens.device)
    head_dim = tokens.shape[-1]
    sums = sum_tokens(tokens, *local_tokens)[..., :head_dim].sum(dim=2)  # [H, B, D]
    gathered = group.all_gather_along(sums[None].contiguous()).sum(dim=0)
    mean = gathered.to(torch.float64) * (MEAN_UNIT / layout.tokens)
    return mean.to(torch.float32).transpose(0, 1).contiguous()


def mean_bytes(batch: int, heads: int, head_dim: int, ranks: int) -> int:
    """Bytes that a rank sends to others for one mean."""
    return 8 * batch * heads * head_dim * (ranks - 1)


@functools.lru_cache(maxsize=8)  # the same at every attention of a video size
def _own_tokens(layout: SequenceLayout, rank: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the rank's slots with a token, in blocks: `position` and `first` of `sum_tokens`."""
    target = layout.tokens_at(rank)[1]
    first = np.append(np.arange(0, len(target), SUMMED_AT_ONCE), len(target))
    return to_device(target, device), to_device(first, device)
