"""Predicts bytes and seconds of a plan, and chooses the UxRy that is predicted to be fastest.

Every rank predicts from the same mask and constants, so all choose the same strategy (paper §4.3). Without constants,
a rule chooses by the numbers of heads and of ranks per node.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import torch

from dbsp_core.comm.block_pooling import mean_bytes
from dbsp_core.comm.exchange_tables import exchange_q_separately
from dbsp_core.cost.machine import Constants, Hardware
from dbsp_core.layout.sequence_layout import SequenceLayout
from dbsp_core.layout.strategy import Strategy
from dbsp_core.masks.grid import BlockGrid, Order
from dbsp_core.planning.chunks import ALL
from dbsp_core.planning.comm_dtype import CommDtype
from dbsp_core.planning.plan import Plan
from dbsp_core.utils.errors import UserError


@dataclass(frozen=True, eq=False)
class Traffic:
    """Tokens of one head that one attention sends; multiply by batch, head_dim and element size for bytes."""

    queries: np.ndarray  # float64[P, P], from source rank (row) to owner (column); outputs return the same way
    keys: np.ndarray  # float64[y, P, P], by chunk, from source rank to the rank that uses them; values likewise
    rows: np.ndarray  # int64[P], rows each rank owns
    blocks: np.ndarray  # int64[y, P], by chunk, KV blocks that each rank uses

    @property
    def dispatch(self) -> np.ndarray:
        """float64[P, P]: queries and the first chunk's keys and values, from source rank to owner."""
        return self.queries + 2 * self.keys[0]

    @property
    def kv_received(self) -> float:
        """Tokens of k and v that a rank receives from others, mean over ranks."""
        return sum(float(sent.sum() - sent.trace()) for sent in 2 * self.keys) / len(self.rows)


def traffic_of(plan: Plan, layout: SequenceLayout) -> Traffic:
    """Counts the tokens that a plan sends under `layout`. Raises ValueError if they do not fit each other."""
    strategy, grid, chunks = plan.strategy, plan.grid, plan.chunks
    if (layout.tokens, layout.world) != (grid.tokens, strategy.world):
        raise ValueError(
            f"expected a sequence layout of {grid.tokens} tokens on {strategy.world} ranks, got {layout.tokens} on "
            f"{layout.world}; pass the layout that the plan was made for"
        )
    queries = np.zeros((strategy.world, strategy.world))
    keys = np.zeros((chunks.ring, strategy.world, strategy.world))
    blocks = np.zeros((chunks.ring, strategy.world), dtype=np.int64)
    for order, heads in grid.order_groups(plan.heads):
        q_source, k_source = tokens_at(layout, grid, order)
        queries += q_source.T @ copies_by_rank(plan.owner[heads], strategy.world).T
        for chunk, copies in enumerate(chunks.copies(heads)):
            keys[chunk] += k_source.T @ copies.T
            blocks[chunk] += copies.sum(axis=1, dtype=np.int64)
    rows = np.bincount(plan.owner.ravel(), minlength=strategy.world)
    return Traffic(queries, keys, rows, blocks)


def copies_by_rank(ranks: np.ndarray, world: int) -> np.ndarray:
    """Counts the heads that put each block on each rank: int64[heads, n] of ranks → float64[world, n]."""
    blocks = ranks.shape[1]
    flat = (ranks * blocks + np.arange(blocks)).ravel()
    return np.bincount(flat, minlength=world * blocks).reshape(world, blocks).astype(np.float64)


@lru_cache(maxsize=32)
def tokens_at(layout: SequenceLayout, grid: BlockGrid, order: Order) -> tuple[np.ndarray, np.ndarray]:
    """Returns float64[nq, P], float64[nk, P]: tokens of each query and KV block in each rank's local shard."""
    q, k = layout.block_segments(grid, order)
    return q.tokens_by_rank(grid.nq, layout.world), k.tokens_by_rank(grid.nk, layout.world)


@dataclass(frozen=True)
class AttentionShape:
    """Sizes of q, k, v and the output of all ranks, apart from tokens."""

    batch: int
    heads: int  # the plan's heads; with masks per batch item, B·H, and batch is 1
    head_dim: int
    element_bytes: int = 2

    @classmethod
    def from_q(cls, q: torch.Tensor, heads: int) -> AttentionShape:
        """Returns the shape for this rank's q [B, H, n_local, D] under a plan of `heads` heads, H or B·H."""
        batch, local_heads, _, head_dim = q.shape
        return cls(batch if heads == local_heads else 1, heads, head_dim, q.element_size())

    @property
    def token_bytes(self) -> int:
        """Bytes in memory of one token of one head of q, k, v or the output, over the batch."""
        return self.batch * self.head_dim * self.element_bytes

    def sent_bytes(self, comm_dtype: CommDtype) -> int:
        """Returns the bytes of one token of one head of q, k or v in its communication dtype."""
        return self.batch * comm_dtype.token_bytes(self.head_dim, self.element_bytes)

    def out_bytes(self, comm_dtype: CommDtype) -> int:
        """Returns the bytes of one token of one head of the output in its communication dtype."""
        return self.batch * comm_dtype.out_bytes(self.head_dim, self.element_bytes)


@dataclass(frozen=True)
class Prediction:
    """Seconds of one attention on all ranks; exchanges wait for the slowest rank."""

    exchange_s: float  # Exchanges to owners and back
    attention_s: float  # From the first kernel's start until the last rank's end
    pack_s: float  # Packing and unpacking exchange buffers
    launch_s: float  # Launches outside of chunks

    @property
    def total_s(self) -> float:
        return self.exchange_s + self.pack_s + self.launch_s + self.attention_s


def predict(
    plan: Plan,
    shape: AttentionShape,
    hardware: Hardware,
    nodes: Sequence[int] | None = None,
    layout: SequenceLayout | None = None,
) -> Prediction:
    """Predicts by the paper's Eq. 4, corrected to use every rank's actual work, bytes and packing.

    Args:
        nodes: Node of each rank. None: all ranks on one node.
        layout: Layout that the plan was made for, which determines the bytes sent. None: contiguous.

    Raises:
        UserError: Plan, shape and nodes do not fit, or needed network constants are unknown.
    """
    strategy, comm_dtype = plan.strategy, plan.comm_dtype
    known = hardware.at_blocks(plan.grid.block_q, plan.grid.block_k)
    nodes = [0] * strategy.world if nodes is None else nodes
    layout = layout or SequenceLayout.contiguous(plan.grid.tokens, strategy.world)
    strategy.require_world(len(nodes))
    if shape.heads != plan.heads:
        raise UserError(f"expected a shape with the plan's {plan.heads} heads, got {shape.heads}")
    require_network(hardware, nodes)
    # 1. Bytes of each exchange to owners and back, float64[P, P]
    traffic, sent_bytes = traffic_of(plan, layout), shape.sent_bytes(comm_dtype)
    apart = exchange_q_separately(plan)
    dispatched = [traffic.queries, 2 * traffic.keys[0]] if apart else [traffic.dispatch]
    exchanged = [*(tokens * sent_bytes for tokens in dispatched), traffic.queries.T * shape.out_bytes(comm_dtype)]
    if comm_dtype.is_int8:
        means = float(mean_bytes(shape.batch, shape.heads, shape.head_dim, 2))
        exchanged.append(np.full((strategy.world, strategy.world), means))
    # 2. Seconds
    grid = plan.grid
    slots = hardware.row_slots(grid.block_q, grid.block_k, shape.head_dim) if hardware.whole_rows else None
    compute = compute_s(plan, traffic, shape, known, slots)
    # For later chunks, a rank sends to the ranks of one ring rank and receives from those of another.
    pairwise = replace(known, exchange_latency_s=known.p2p_latency_s, exchange_bytes_per_s=known.p2p_bytes_per_s)
    fetches = [exchange_s(2 * keys * sent_bytes, pairwise, nodes) for keys in traffic.keys[1:]]
    return Prediction(
        exchange_s=sum(exchange_s(sent, known, nodes) for sent in exchanged),
        attention_s=attention_s(compute, fetches, known.overlap),
        pack_s=_packed_bytes(plan, traffic, layout, shape) / known.pack_bytes_per_s,
        launch_s=known.call_s,
    )


def require_network(hardware: Hardware, nodes: Sequence[int]) -> None:
    """Raises UserError for ranks on several nodes without network constants."""
    if len(set(nodes)) > 1 and hardware.constants.network_bytes_per_s is None:
        raise UserError(
            f"{len(nodes)} ranks on {len(set(nodes))} nodes need network constants, which hardware {hardware.name!r} "
            "lacks; add network_latency_s and network_bytes_per_s, or use one node"
        )


def exchange_s(sent: np.ndarray, known: Constants, nodes: Sequence[int]) -> float:
    """Returns the seconds of one all-to-all by the busiest rank's bytes; NVLink and network overlap.

    `sent` has float64[P, P], bytes from rank (row) to rank (column), whose diagonal is ignored; `nodes` each rank's.
    """
    if len(sent) == 1:
        return 0.0
    near = np.equal.outer(nodes, nodes)

    def busiest(part: np.ndarray) -> float:
        return float(max(part.sum(axis=0).max(), part.sum(axis=1).max()))

    inside = busiest(np.where(near & ~np.eye(len(sent), dtype=bool), sent, 0))
    seconds = known.exchange_latency_s + inside / known.exchange_bytes_per_s
    if known.network_bytes_per_s is None or known.network_latency_s is None or near.all():
        return seconds
    return max(seconds, known.network_latency_s + busiest(np.where(near, 0, sent)) / known.network_bytes_per_s)


MERGE_BYTES = 12  # per output element: two float32 read, one written


def compute_s(
    plan: Plan, traffic: Traffic, shape: AttentionShape, known: Constants, slots: int | None = None
) -> np.ndarray:
    """Returns seconds float64[chunks, P] of launches, blocks, rows, and merges from the second chunk on.

    A rank's work is divided over chunks in proportion to its KV blocks. `slots` are the rows that a GPU computes at a
    time if rows are not cut, so that the longest row bounds the time. None: rows are cut, or the number is unknown.
    """
    grid = plan.grid
    share = traffic.blocks / np.maximum(1, traffic.blocks.sum(axis=0))
    blocks = shape.batch * plan.work
    if slots is not None:
        blocks = np.maximum(blocks, slots * plan.longest)
    seconds: np.ndarray = share * (blocks * block_s(grid.block_q, grid.block_k, shape.head_dim, known))
    seconds += traffic.rows * (shape.batch * known.row_s)
    seconds[1:] += traffic.rows * (grid.block_q * shape.batch * shape.head_dim * MERGE_BYTES / known.merge_bytes_per_s)
    return seconds + known.launch_s


def block_s(block_q: int, block_k: int, head_dim: int, known: Constants) -> float:
    """Returns the seconds of one active block: two products of 2·Bq·Bk·D FLOP and the softmax."""
    return block_q * block_k * (4 * head_dim / known.flops_per_s + known.score_s)


def attention_s(compute: np.ndarray, fetches: Sequence[float], overlap: float) -> float:
    """Returns the seconds until the last rank is done; each chunk is requested one kernel ahead.

    `compute` has seconds float64[chunks, P], `fetches` those of the exchange of each chunk after the first; `overlap`
    is the fraction of the shorter of compute and transfer that is hidden behind the longer.
    """
    done = np.zeros(compute.shape[1])
    for kernel_s, fetch_s in zip(compute, [*fetches, 0.0], strict=True):
        done = np.maximum(done + kernel_s, done + fetch_s)
    hidden = compute.sum(axis=0) + sum(fetches) - done
    return float((done + (1 - overlap) * hidden).max())


def _packed_bytes(plan: Plan, traffic: Traffic, layout: SequenceLayout, shape: AttentionShape) -> float:
    """Returns the bytes packed and unpacked by the busiest rank.

    Counts q, k, v and output in its shard and as packed at owners. Selected keys are gathered once per reader. int8 is
    unpacked unchanged and then read; subtracting the keys' mean reads them once more.
    """
    comm_dtype, token = plan.comm_dtype, shape.token_bytes
    unpacked = traffic.rows * plan.grid.block_q + 2 * traffic.blocks.sum(axis=0) * plan.grid.block_k
    packed = unpacked + traffic.rows * plan.grid.block_q
    first, *further = (2 * keys.sum(axis=1) for keys in traffic.keys)
    in_shard = 2 * shape.heads * layout.shard + first
    if further:  # equal keys for several ring ranks are packed once
        identical = (plan.chunks.keys == ALL) & (np.ptp(further, axis=0) == 0)
        in_shard = in_shard + np.where(identical, further[0], np.sum(further, axis=0))
    total = (in_shard + packed) * token
    if comm_dtype.is_int8:
        total = total + unpacked * shape.sent_bytes(comm_dtype) + shape.heads * layout.shard * token
    return float(np.max(total))


AUTO = "auto"
"""The strategy is chosen by `StrategySelector`."""
HYSTERESIS = 0.02
"""Fraction of the predicted time that a change of strategy must save, since its cost is not predicted."""


def candidates(world: int, grid: BlockGrid, merges: bool = True) -> tuple[Strategy, ...]:
    """Returns every UxRy of `world` ranks with a KV block per ring rank; without rings unless the kernel merges."""
    return tuple(s for s in Strategy.all_for(world) if s.ring <= grid.nk and (merges or s.ring == 1))


def by_rule(strategies: Sequence[Strategy], heads: int, nodes: Sequence[int]) -> list[Strategy]:
    """Returns the strategies, best first, by a rule without constants.

    As many ranks as possible share heads, up to the number of heads and within a node: an all-to-all sends less than a
    ring, with one kernel launch, no merge and no network. Rings join nodes. Strategies that share heads across nodes
    or among more ranks than heads come last.
    """

    def order(strategy: Strategy) -> tuple[bool, int]:
        ring_nodes = np.reshape(nodes, (strategy.ring, strategy.ulysses))
        fits = strategy.ulysses <= heads and bool((ring_nodes == ring_nodes[:, :1]).all())
        return not fits, -strategy.ulysses if fits else strategy.ulysses

    return sorted(strategies, key=order)


@dataclass(frozen=True)
class StrategySelector:
    """The candidate strategies for one video size, with the data to predict their time."""

    strategies: tuple[Strategy, ...]
    hardware: Hardware | None  # None: take the first strategy `by_rule`
    nodes: tuple[int, ...]  # The node of each rank
    layout: SequenceLayout  # Layout of the forward pass, common to all strategies

    def choose(self, make: Callable[[Strategy], Plan], shape: AttentionShape, current: Strategy | None) -> Plan:
        """Plans every strategy with `make` and returns the fastest plan; `current` is in use (None at first)."""
        if self.hardware is None:
            return make(by_rule(self.strategies, shape.heads, self.nodes)[0])
        plans = {strategy: make(strategy) for strategy in self.strategies}
        # Integer nanoseconds, so that rounding differences between ranks cannot change the choice.
        ns = {
            strategy: round(predict(plan, shape, self.hardware, self.nodes, self.layout).total_s * 1e9)
            for strategy, plan in plans.items()
        }
        best = min(ns, key=ns.__getitem__)
        if current in ns and ns[current] * (1 - HYSTERESIS) <= ns[best]:
            best = current
        return plans[best]
