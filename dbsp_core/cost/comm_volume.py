"""Who sends how much to whom: the bytes of an assignment, counted from blocks, in microseconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from dbsp_core.layout.sequence_layout import SequenceLayout, ShardSegments
from dbsp_core.masks.grid import BlockAxis, BlockGrid, Order
from dbsp_core.planning.assignment import Assignment

__all__ = ["Traffic", "traffic_of"]


@dataclass(frozen=True, eq=False)
class Traffic:
    """What one attention moves, in tokens of one head. To turn into bytes: times batch, head_dim and element size.

    queries: float64[P, P], queries from home rank (row) to owner (column); outputs go the same way back
    keys:    float64[P, P], keys from home rank to the rank that holds their slot first; values likewise. Of needed
             keys, those of the first chunk
    rows:    int64[P], rows each rank owns
    slots:   int64[y, x], KV blocks of each (slot, Ulysses column); of needed keys, of the first chunk of rank r·x + u
    fetched: float64[chunks, P, P], needed keys of each further chunk, from home rank to reader; None: keys go round
             the ring
    fetched_blocks: int64[chunks, P], KV blocks of those chunks
    block_k: tokens of a whole KV block
    """

    queries: np.ndarray
    keys: np.ndarray
    rows: np.ndarray
    slots: np.ndarray
    fetched: np.ndarray | None = None
    fetched_blocks: np.ndarray | None = None
    block_k: int = 0

    @property
    def dispatch(self) -> np.ndarray:
        """float64[P, P]: queries, keys and values from home to owner."""
        return self.queries + 2 * self.keys

    @property
    def key_exchanges(self) -> tuple[np.ndarray, ...]:
        """float64[P, P] by exchange, tokens of keys and values together."""
        return (2 * self.keys, *([] if self.fetched is None else 2 * self.fetched))

    def in_chunks(self, shares: Sequence[int]) -> Traffic:
        """About the same where needed keys come in these further chunks: as if the keys of all were alike.

        shares: see `Assignment.chunk_shares`
        """
        if self.fetched is None or self.fetched_blocks is None:
            raise ValueError("keys that go round the ring do not come in chunks")
        part = np.array(shares) / sum(shares)
        fetched = part[:, None, None] * self.fetched.sum(axis=0)
        return replace(self, fetched=fetched, fetched_blocks=part[:, None] * self.fetched_blocks.sum(axis=0))

    @property
    def kv_received(self) -> float:
        """Tokens of K and V that a rank receives from others, mean over ranks: exchanged, and round the ring."""
        exchanged = sum(float(sent.sum() - sent.trace()) for sent in self.key_exchanges)
        handed_over = (
            0.0 if self.fetched is not None else 2.0 * self.block_k * self.slots.sum() * (len(self.slots) - 1)
        )
        return (exchanged + handed_over) / len(self.rows)

    @property
    def combine(self) -> np.ndarray:
        """float64[P, P]: outputs from owner to home."""
        return self.queries.T


def traffic_of(assignment: Assignment, layout: SequenceLayout) -> Traffic:
    """Counts what an assignment moves under `layout`. Raises ValueError when they do not fit each other."""
    strategy, grid = assignment.strategy, assignment.grid
    if (layout.tokens, layout.world) != (grid.tokens, strategy.world):
        raise ValueError(
            f"sequence layout of {layout.tokens} tokens on {layout.world} ranks does not fit a plan of {grid.tokens} "
            f"tokens on {strategy.world}; give the one the plan was made for"
        )
    queries = np.zeros((strategy.world, strategy.world))
    chunks = 1 if assignment.needed is None else assignment.periods
    keys, *fetched = np.zeros((chunks, strategy.world, strategy.world))
    slots, *fetched_blocks = np.zeros((chunks, strategy.world), dtype=np.int64)
    for order, heads in grid.order_groups(assignment.heads):
        q_home, k_home = _tokens_at(layout, grid, order)
        queries += q_home.T @ _by_rank(assignment.q_owner[heads], strategy.world).T
        if assignment.needed is not None:
            narrow = np.uint8 if len(heads) < 256 else np.uint16  # the narrower, the faster
            many = (np.add.reduce(chunk[:, heads], axis=1, dtype=narrow) for chunk in assignment.chunks)
            for chunk, sent, blocks in zip(many, (keys, *fetched), (slots, *fetched_blocks), strict=True):
                sent += k_home.T @ chunk.T
                blocks += chunk.sum(axis=1, dtype=np.int64)
            continue
        head, column = np.nonzero(assignment.head_ulysses_ranks[heads])
        holder = assignment.kv_slot[heads][head] * strategy.ulysses + column[:, None]
        held = _by_rank(holder, strategy.world)
        keys += k_home.T @ held.T
        slots += held.sum(axis=1).astype(np.int64)
    rows = np.bincount(assignment.q_owner.ravel(), minlength=strategy.world)
    by_slot = slots.reshape(strategy.ring, strategy.ulysses)
    if assignment.needed is None:
        return Traffic(queries, keys, rows, by_slot, block_k=grid.block_k)
    sent, blocks = np.reshape(fetched, (-1, *keys.shape)), np.reshape(fetched_blocks, (-1, *slots.shape))
    return Traffic(queries, keys, rows, by_slot, sent, blocks, grid.block_k)


def _by_rank(ranks: np.ndarray, world: int) -> np.ndarray:
    """float64[world, n]: how many heads put each block on each rank. ranks: int64[heads, n]"""
    blocks = ranks.shape[1]
    flat = (ranks * blocks + np.arange(blocks)).ravel()
    return np.bincount(flat, minlength=world * blocks).reshape(world, blocks).astype(np.float64)


@lru_cache(maxsize=32)
def _tokens_at(layout: SequenceLayout, grid: BlockGrid, order: Order) -> tuple[np.ndarray, np.ndarray]:
    """float64[nq, P], float64[nk, P]: tokens of each query and KV block that live on each rank."""

    def tokens(pieces: ShardSegments, axis: BlockAxis) -> np.ndarray:
        found = np.zeros((len(axis), layout.world))
        np.add.at(found, (pieces.block, pieces.rank), pieces.length)
        return found

    q, k = layout.block_segments(grid, order)
    return tokens(q, grid.q_axis), tokens(k, grid.k_axis)
