"""Who sends how much to whom: the bytes of an assignment, counted from blocks, in microseconds."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from dbsp_core.layout.sequence_layout import SequenceLayout, ShardSegments
from dbsp_core.masks.grid import BlockAxis, BlockGrid, Order
from dbsp_core.planning.assignment import Assignment

__all__ = ["Traffic", "copies_by_rank", "tokens_at", "traffic_of"]


@dataclass(frozen=True, eq=False)
class Traffic:
    """What one attention moves, in tokens of one head. To turn into bytes: times batch, head_dim and element size.

    Attributes:
        queries: float64[P, P], queries from home rank (row) to owner (column); outputs go the same way back.
        keys: float64[y, P, P], keys from home rank to the ranks that compute with them, by chunk; values likewise.
        rows: int64[P], rows each rank owns.
        blocks: int64[y, P], KV blocks that each rank computes with, by chunk.
    """

    queries: np.ndarray
    keys: np.ndarray
    rows: np.ndarray
    blocks: np.ndarray

    @property
    def dispatch(self) -> np.ndarray:
        """float64[P, P]: queries, and the first chunk's keys and values, from home to owner."""
        return self.queries + 2 * self.keys[0]

    @property
    def key_exchanges(self) -> tuple[np.ndarray, ...]:
        """float64[P, P] by chunk, tokens of keys and values together."""
        return tuple(2 * self.keys)

    @property
    def kv_received(self) -> float:
        """Tokens of K and V that a rank receives from others, mean over ranks."""
        return sum(float(sent.sum() - sent.trace()) for sent in self.key_exchanges) / len(self.rows)

    @property
    def combine(self) -> np.ndarray:
        """float64[P, P]: outputs from owner to home."""
        return self.queries.T


def traffic_of(assignment: Assignment, layout: SequenceLayout) -> Traffic:
    """Counts what an assignment moves under `layout`. Raises ValueError when they do not fit each other."""
    strategy, grid, chunks = assignment.strategy, assignment.grid, assignment.chunks
    if (layout.tokens, layout.world) != (grid.tokens, strategy.world):
        raise ValueError(
            f"sequence layout of {layout.tokens} tokens on {layout.world} ranks does not fit a plan of {grid.tokens} "
            f"tokens on {strategy.world}; give the one the plan was made for"
        )
    queries = np.zeros((strategy.world, strategy.world))
    keys = np.zeros((chunks.ring, strategy.world, strategy.world))
    blocks = np.zeros((chunks.ring, strategy.world), dtype=np.int64)
    for order, heads in grid.order_groups(assignment.heads):
        q_home, k_home = tokens_at(layout, grid, order)
        queries += q_home.T @ copies_by_rank(assignment.q_owner[heads], strategy.world).T
        for chunk, copies in enumerate(chunks.copies(heads)):
            keys[chunk] += k_home.T @ copies.T
            blocks[chunk] += copies.sum(axis=1, dtype=np.int64)
    rows = np.bincount(assignment.q_owner.ravel(), minlength=strategy.world)
    return Traffic(queries, keys, rows, blocks)


def copies_by_rank(ranks: np.ndarray, world: int) -> np.ndarray:
    """float64[world, n]: how many heads put each block on each rank, from ranks int64[heads, n]."""
    blocks = ranks.shape[1]
    flat = (ranks * blocks + np.arange(blocks)).ravel()
    return np.bincount(flat, minlength=world * blocks).reshape(world, blocks).astype(np.float64)


@lru_cache(maxsize=32)
def tokens_at(layout: SequenceLayout, grid: BlockGrid, order: Order) -> tuple[np.ndarray, np.ndarray]:
    """float64[nq, P], float64[nk, P]: tokens of each query and KV block that live on each rank."""

    def tokens(pieces: ShardSegments, axis: BlockAxis) -> np.ndarray:
        found = np.zeros((len(axis), layout.world))
        np.add.at(found, (pieces.block, pieces.rank), pieces.length)
        return found

    q, k = layout.block_segments(grid, order)
    return tokens(q, grid.q_axis), tokens(k, grid.k_axis)
