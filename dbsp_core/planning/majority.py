"""Where blocks are outside attention, and who owns rows in plain Ulysses, Ring and USP."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from dbsp_core.layout.sequence_layout import SequenceLayout, ShardSegments
from dbsp_core.layout.strategy import Strategy
from dbsp_core.masks.grid import BlockAxis, BlockGrid, Order
from dbsp_core.masks.token_order import CANONICAL
from dbsp_core.planning.baselines import balanced_majority_rank, contiguous_heads, majority_rank

__all__ = ["block_positions", "majority_ring_ranks", "plain_owners"]


@lru_cache(maxsize=16)
def plain_owners(grid: BlockGrid, heads: int, strategy: Strategy) -> np.ndarray:
    """int64[H, nq]: the rank of each row without db-SP: heads in equal runs, blocks in contiguous shards."""
    layout = SequenceLayout.contiguous(grid.tokens, strategy.world)
    home, _ = majority_ring_ranks(layout, grid, heads, strategy)
    (owner,) = _read_only((home * strategy.ulysses + contiguous_heads(heads, strategy.ulysses)[:, None],))
    return owner


@lru_cache(maxsize=16)
def majority_ring_ranks(
    layout: SequenceLayout, grid: BlockGrid, heads: int, strategy: Strategy
) -> tuple[np.ndarray, np.ndarray]:
    """int64[nq], int64[nk]: the ring rank that holds most of each query and KV block.

    [H, nq], [H, nk] where heads have token orders of their own.
    """

    def residents(segments: ShardSegments, axis: BlockAxis, order: Order) -> np.ndarray:
        tokens = segments.tokens_by_ring(len(axis), strategy)
        return majority_rank(tokens) if order == CANONICAL else balanced_majority_rank(tokens)

    def by_order(order: Order) -> tuple[np.ndarray, np.ndarray]:
        q, k = layout.block_segments(grid, order)
        return residents(q, grid.q_axis, order), residents(k, grid.k_axis, order)

    if grid.common_order is not None:
        q_ring, k_ring = _read_only(by_order(grid.common_order))
        return q_ring, k_ring
    q_ring, k_ring = (np.empty((heads, len(axis)), dtype=np.int64) for axis in (grid.q_axis, grid.k_axis))
    for order, in_order in grid.order_groups(heads):
        q_ring[in_order], k_ring[in_order] = by_order(order)
    q_ring, k_ring = _read_only((q_ring, k_ring))
    return q_ring, k_ring


def block_positions(grid: BlockGrid) -> np.ndarray:
    """Returns float64[nq], the mean canonical position of each query block's tokens.

    If heads have token orders of their own, positions follow these orders, which keep what is attended to together.
    """
    if grid.common_order is None:
        return np.arange(float(grid.nq))
    return np.add.reduceat(grid.token_permutation(grid.common_order), grid.q_axis.starts) / grid.q_axis.lengths


def _read_only(arrays: tuple[np.ndarray, ...]) -> tuple[np.ndarray, ...]:
    """The same arrays, protected: all plans made from them share them."""
    for array in arrays:
        array.flags.writeable = False
    return arrays
