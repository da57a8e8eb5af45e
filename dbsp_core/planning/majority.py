"""The assignment that leaves blocks where they are before the exchange: plain Ulysses, Ring and USP."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from dbsp_core.layout.sequence_layout import SequenceLayout, ShardSegments
from dbsp_core.layout.strategy import Strategy
from dbsp_core.masks.grid import BlockAxis, BlockGrid, Order
from dbsp_core.masks.token_order import CANONICAL
from dbsp_core.planning.assignment import Assignment
from dbsp_core.planning.baselines import balanced_majority_rank, contiguous_assignment, majority_rank
from dbsp_core.planning.key_travel import RingKeys

__all__ = ["baseline_assignment", "block_positions", "majority_ring_ranks"]


@lru_cache(maxsize=16)
def baseline_assignment(grid: BlockGrid, heads: int, strategy: Strategy) -> Assignment:
    """The contiguous assignment on the contiguous layout, which is what runs without db-SP; equal for all masks."""
    layout = SequenceLayout.contiguous(grid.tokens, strategy.world)
    rings = majority_ring_ranks(layout, grid, heads, strategy)
    q_owner, slot = _read_only(contiguous_assignment(heads, *rings, strategy.ulysses))
    return Assignment(strategy, grid, q_owner, RingKeys(slot, strategy.ring))


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
        return _read_only(by_order(grid.common_order))
    q_ring, k_ring = (np.empty((heads, len(axis)), dtype=np.int64) for axis in (grid.q_axis, grid.k_axis))
    for order, in_order in grid.order_groups(heads):
        q_ring[in_order], k_ring[in_order] = by_order(order)
    return _read_only((q_ring, k_ring))


def block_positions(grid: BlockGrid) -> np.ndarray:
    """Returns float64[nq], the mean canonical position of each query block's tokens.

    If heads have token orders of their own, positions follow these orders, which keep what is attended to together.
    """
    if grid.common_order is None:
        return np.arange(float(grid.nq))
    return np.add.reduceat(grid.token_permutation(grid.common_order), grid.q_axis.starts) / grid.q_axis.lengths


def _read_only(arrays: tuple[np.ndarray, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """The same arrays, protected: all plans made from them share them."""
    for array in arrays:
        array.flags.writeable = False
    return arrays
