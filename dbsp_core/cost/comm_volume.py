"""Who sends how much to whom: the bytes of a plan, counted from blocks. numpy alone at work; microseconds per plan."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from dbsp_core.layout.sequence_layout import SequenceLayout, ShardSegments
from dbsp_core.masks.grid import BlockAxis, BlockGrid
from dbsp_core.planning.plan import Plan

__all__ = ["Traffic", "exchange_q_separately", "traffic_of"]

UNEVEN = 1.05
"""Rows of the rank that has most over their mean, from which on memory counts more than one more exchange."""


@dataclass(frozen=True, eq=False)
class Traffic:
    """What one attention moves, in tokens of one head. To turn into bytes: times batch, head_dim and element size.

    queries: float64[P, P], queries from home rank (row) to owner (column); outputs go the same way back
    keys:    float64[P, P], keys from home rank to the rank that holds their slot first; values likewise
    rows:    int64[P], rows each rank owns
    slots:   int64[y, x], KV blocks of each (slot, Ulysses column)
    """

    queries: np.ndarray
    keys: np.ndarray
    rows: np.ndarray
    slots: np.ndarray

    @property
    def to_owners(self) -> np.ndarray:
        """float64[P, P]: queries, keys and values from home to owner."""
        return self.queries + 2 * self.keys

    @property
    def to_homes(self) -> np.ndarray:
        """float64[P, P]: outputs from owner to home."""
        return self.queries.T


def traffic_of(plan: Plan, home: SequenceLayout) -> Traffic:
    """Counts what `plan` moves under `home`. Raises ValueError when they do not fit each other."""
    strategy, grid = plan.strategy, plan.grid
    if (home.tokens, home.world) != (grid.tokens, strategy.world):
        raise ValueError(
            f"home layout of {home.tokens} tokens on {home.world} ranks does not fit a plan of {grid.tokens} tokens "
            f"on {strategy.world}; give the one the plan was made for"
        )
    queries = np.zeros((strategy.world, strategy.world))
    keys = np.zeros_like(queries)
    slots = np.zeros(strategy.world, dtype=np.int64)
    for order, heads in grid.order_groups(plan.heads):
        q_home, k_home = _tokens_at(home, grid, order)
        queries += q_home.T @ _by_rank(plan.q_owner[heads], strategy.world).T
        head, column = np.nonzero(plan.head_columns[heads])
        holder = plan.kv_slot[heads][head] * strategy.ulysses + column[:, None]
        held = _by_rank(holder, strategy.world)
        keys += k_home.T @ held.T
        slots += held.sum(axis=1).astype(np.int64)
    rows = np.bincount(plan.q_owner.ravel(), minlength=strategy.world)
    return Traffic(queries, keys, rows, slots.reshape(strategy.ring, strategy.ulysses))


def exchange_q_separately(plan: Plan) -> bool:
    """Whether queries have an exchange of their own, before that of keys and values.

    With Ulysses alone memory is fullest when q, k and v lie twice at their owner, as they came and as the kernel reads
    them. Where a rank has many more rows than most, because they are sparse, that would be more than plain Ulysses
    takes, so that queries are put in their place first. Rings are fullest later.
    """
    if plan.strategy.ring > 1 or plan.strategy.world == 1:
        return False
    rows = np.bincount(plan.q_owner.ravel(), minlength=plan.strategy.world)
    return bool(rows.max() * plan.strategy.world > UNEVEN * plan.q_owner.size)


def _by_rank(ranks: np.ndarray, world: int) -> np.ndarray:
    """float64[world, n]: how many heads put each block on each rank. ranks: int64[heads, n]"""
    blocks = ranks.shape[1]
    flat = (ranks * blocks + np.arange(blocks)).ravel()
    return np.bincount(flat, minlength=world * blocks).reshape(world, blocks).astype(np.float64)


@lru_cache(maxsize=32)
def _tokens_at(home: SequenceLayout, grid: BlockGrid, order: str) -> tuple[np.ndarray, np.ndarray]:
    """float64[nq, P], float64[nk, P]: tokens of each query and KV block that live on each rank."""

    def tokens(pieces: ShardSegments, axis: BlockAxis) -> np.ndarray:
        found = np.zeros((len(axis), home.world))
        np.add.at(found, (pieces.block, pieces.rank), pieces.length)
        return found

    q, k = home.block_segments(grid, order)
    return tokens(q, grid.q_axis), tokens(k, grid.k_axis)
