"""Bytes and seconds of a plan, counted from blocks in microseconds, and the UxRy that is predicted to be fastest.

Every rank predicts for itself, from the mask's bits and the constants of one file: all choose the same strategy
(paper §4.3). Without constants a rule chooses, by the numbers of heads and of ranks per node.
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
    """Tokens of one head that one attention sends. To turn into bytes: times batch, head_dim and element size."""

    queries: np.ndarray  # float64[P, P], from source rank (row) to owner (column); outputs go the same way back
    keys: np.ndarray  # float64[y, P, P], from source rank to those that compute with them, by chunk; values likewise
    rows: np.ndarray  # int64[P], rows each rank owns
    blocks: np.ndarray  # int64[y, P], KV blocks that each rank computes with, by chunk

    @property
    def dispatch(self) -> np.ndarray:
        """float64[P, P]: queries, and the first chunk's keys and values, from source rank to owner."""
        return self.queries + 2 * self.keys[0]

    @property
    def kv_received(self) -> float:
        """Tokens of K and V that a rank receives from others, mean over ranks."""
        return sum(float(sent.sum() - sent.trace()) for sent in 2 * self.keys) / len(self.rows)


def traffic_of(plan: Plan, layout: SequenceLayout) -> Traffic:
    """Counts what a plan sends under `layout`. Raises ValueError when they do not fit each other."""
    strategy, grid, chunks = plan.strategy, plan.grid, plan.chunks
    if (layout.tokens, layout.world) != (grid.tokens, strategy.world):
        raise ValueError(
            f"sequence layout of {layout.tokens} tokens on {layout.world} ranks does not fit a plan of {grid.tokens} "
            f"tokens on {strategy.world}; give the one the plan was made for"
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
    """Returns float64[world, n]: how many heads put each block on each rank, from ranks int64[heads, n]."""
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
    heads: int  # The plan's; where each batch item has masks of its own, they are the plan's heads and batch is 1
    head_dim: int
    element_bytes: int = 2

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 1:
                raise UserError(f"attention shape: {name}={value} must be at least 1")

    @classmethod
    def from_q(cls, q: torch.Tensor, heads: int) -> AttentionShape:
        """Returns the shape with this rank's q [B, H, n_local, D] where the plan has `heads` heads, H or B·H."""
        batch, local_heads, _, head_dim = q.shape
        return cls(batch if heads == local_heads else 1, heads, head_dim, q.element_size())

    @property
    def token_bytes(self) -> int:
        """Bytes of one token of one head, over the batch: of q, k, v or the output, in memory."""
        return self.batch * self.head_dim * self.element_bytes

    def sent_bytes(self, comm_dtype: CommDtype) -> int:
        """Returns the bytes of one token of one head of q, k or v in its communication dtype."""
        return self.batch * comm_dtype.token_bytes(self.head_dim, self.element_bytes)

    def out_bytes(self, comm_dtype: CommDtype) -> int:
        """Returns those of the output."""
        return self.batch * comm_dtype.out_bytes(self.head_dim, self.element_bytes)


@dataclass(frozen=True)
class Prediction:
    """Seconds of one attention on all ranks together: exchanges wait for the slowest."""

    exchange_s: float  # Exchanges to owners and back
    attention_s: float  # From the first kernel's start until the last rank is done with all chunks
    pack_s: float  # Gathering into exchange buffers and placing from them
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
    """Predicts by the corrected form of Eq. 4: every rank's real work, real bytes, real packing.

    Args:
        nodes: The node of each rank. Default: all ranks on one.
        layout: The layout the plan was made for, which decides what is sent. Default: contiguous.

    Raises:
        UserError: When plan, shape and nodes don't fit, or network constants are needed but not known.
    """
    strategy, comm_dtype = plan.strategy, plan.comm_dtype
    known = hardware.at_blocks(plan.grid.block_q, plan.grid.block_k)
    nodes = [0] * strategy.world if nodes is None else nodes
    layout = layout or SequenceLayout.contiguous(plan.grid.tokens, strategy.world)
    strategy.require_world(len(nodes))
    if shape.heads != plan.heads:
        raise UserError(f"the plan is for {plan.heads} heads, the shape has {shape.heads}; give the plan's")
    require_network(hardware, nodes)
    # 1. Bytes of each exchange to owners and back, float64[P, P].
    traffic, sent_bytes = traffic_of(plan, layout), shape.sent_bytes(comm_dtype)
    apart = exchange_q_separately(plan)
    dispatched = [traffic.queries, 2 * traffic.keys[0]] if apart else [traffic.dispatch]
    exchanged = [*(tokens * sent_bytes for tokens in dispatched), traffic.queries.T * shape.out_bytes(comm_dtype)]
    if comm_dtype.is_int8:
        means = float(mean_bytes(shape.batch, shape.heads, shape.head_dim, 2))
        exchanged.append(np.full((strategy.world, strategy.world), means))
    # 2. Seconds.
    grid = plan.grid
    slots = hardware.row_slots(grid.block_q, grid.block_k, shape.head_dim) if hardware.whole_rows else None
    compute = compute_s(plan, traffic, shape, known, slots)
    # In a later chunk a rank sends to the few ranks of one ring rank, and receives from those of another.
    pairwise = replace(known, exchange_latency_s=known.p2p_latency_s, exchange_bytes_per_s=known.p2p_bytes_per_s)
    fetches = [exchange_s(2 * keys * sent_bytes, pairwise, nodes) for keys in traffic.keys[1:]]
    return Prediction(
        exchange_s=sum(exchange_s(sent, known, nodes) for sent in exchanged),
        attention_s=attention_s(compute, fetches, known.overlap),
        pack_s=_packed_bytes(plan, traffic, layout, shape) / known.pack_bytes_per_s,
        launch_s=known.call_s,
    )


def require_network(hardware: Hardware, nodes: Sequence[int]) -> None:
    """Raises UserError for ranks on several nodes without the constants of what crosses them."""
    if len(set(nodes)) > 1 and hardware.constants.network_bytes_per_s is None:
        raise UserError(
            f"{len(nodes)} ranks on {len(set(nodes))} nodes need network constants, which hardware {hardware.name!r} "
            "lacks; add network_latency_s and network_bytes_per_s, or use one node"
        )


def exchange_s(sent: np.ndarray, known: Constants, nodes: Sequence[int]) -> float:
    """Seconds of one all-to-all: the busiest rank's bytes, sent or received. NVLink and network work at the same time.

    Args:
        sent: float64[P, P], bytes from rank (row) to rank (column); what stays on a rank is not sent.
        nodes: The node of each rank.
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


MERGE_BYTES = 12  # of memory per output element that a merge touches: two float32 read, one written


def compute_s(
    plan: Plan, traffic: Traffic, shape: AttentionShape, known: Constants, slots: int | None = None
) -> np.ndarray:
    """Returns float64[chunks, P]: launch, blocks, rows, and from the second chunk on the merge.

    A rank's work is spread over its chunks as its KV blocks are: only its sum is counted.

    Args:
        slots: Rows that a GPU computes at a time if the kernel computes them whole: none of them ends before its
            longest row. None: long rows are cut, or the number is not known.
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
    """Returns seconds of one active block: two products of 2·Bq·Bk·D FLOP, and the scores' softmax."""
    return block_q * block_k * (4 * head_dim / known.flops_per_s + known.score_s)


def attention_s(compute: np.ndarray, fetches: Sequence[float], overlap: float) -> float:
    """Returns seconds until the last rank is done. A chunk is requested a kernel before the kernel that needs it.

    Args:
        compute: float64[chunks, P], seconds.
        fetches: Seconds of the exchange of each chunk after the first.
        overlap: Share of the shorter of compute and transfer that hides behind the longer.
    """
    done = np.zeros(compute.shape[1])
    for kernel_s, fetch_s in zip(compute, [*fetches, 0.0], strict=True):
        done = np.maximum(done + kernel_s, done + fetch_s)
    hidden = compute.sum(axis=0) + sum(fetches) - done
    return float((done + (1 - overlap) * hidden).max())


def _packed_bytes(plan: Plan, traffic: Traffic, layout: SequenceLayout, shape: AttentionShape) -> float:
    """Returns the bytes of the rank that packs and unpacks most.

    They are q, k, v and output in its shard, and the same packed at owners. Selected keys are gathered once for each
    of their readers. int8 is unpacked as it was received, and then read; and keys that are sent less their mean are
    read once more before.
    """
    comm_dtype, token = plan.comm_dtype, shape.token_bytes
    unpacked = traffic.rows * plan.grid.block_q + 2 * traffic.blocks.sum(axis=0) * plan.grid.block_k
    packed = unpacked + traffic.rows * plan.grid.block_q
    first, *further = (2 * keys.sum(axis=1) for keys in traffic.keys)
    in_shard = 2 * shape.heads * layout.shard + first
    if further:  # a rank that sends one ring rank after another the same keys packs them once
        identical = (plan.chunks.keys == ALL) & (np.ptp(further, axis=0) == 0)
        in_shard = in_shard + np.where(identical, further[0], np.sum(further, axis=0))
    total = (in_shard + packed) * token
    if comm_dtype.is_int8:
        total = total + unpacked * shape.sent_bytes(comm_dtype) + shape.heads * layout.shard * token
    return float(np.max(total))


AUTO = "auto"
"""Leaves the choice of a strategy to `StrategySelector`."""
HYSTERESIS = 0.02
"""Share of the predicted time that a change of strategy must save: what a change costs is not predicted."""


def candidates(world: int, grid: BlockGrid, merges: bool = True) -> tuple[Strategy, ...]:
    """Returns every UxRy of `world` ranks that the grid has KV blocks for; no rings if a kernel cannot merge."""
    return tuple(s for s in Strategy.all_for(world) if s.ring <= grid.nk and (merges or s.ring == 1))


def by_rule(strategies: Sequence[Strategy], heads: int, nodes: Sequence[int]) -> list[Strategy]:
    """Returns the strategies with the best first, by a rule that needs no constants.

    As many ranks as possible share heads, as long as each has one and they are on one node: an all-to-all sends
    less than a ring, has one kernel launch and no merge, and crosses no network. Rings join nodes. Strategies that
    share heads beyond a node, or among more ranks than there are heads, come last.
    """

    def order(strategy: Strategy) -> tuple[bool, int]:
        ring_nodes = np.reshape(nodes, (strategy.ring, strategy.ulysses))
        fits = strategy.ulysses <= heads and bool((ring_nodes == ring_nodes[:, :1]).all())
        return not fits, -strategy.ulysses if fits else strategy.ulysses

    return sorted(strategies, key=order)


@dataclass(frozen=True)
class StrategySelector:
    """The strategies of one size of video, and what the time of their plans is predicted by."""

    strategies: tuple[Strategy, ...]
    hardware: Hardware | None  # Constants that times are predicted by; None: the first strategy `by_rule` is taken
    nodes: tuple[int, ...]  # The node of each rank
    layout: SequenceLayout  # The one layout of the forward pass, which plans of all strategies start from

    def choose(self, make: Callable[[Strategy], Plan], shape: AttentionShape, current: Strategy | None) -> Plan:
        """Plans the strategies with `make` and returns the fastest plan. `current` is in use; None at first."""
        if self.hardware is None:
            return make(by_rule(self.strategies, shape.heads, self.nodes)[0])
        plans = {strategy: make(strategy) for strategy in self.strategies}
        # Whole nanoseconds: a last bit that differed between ranks could not make them choose differently.
        ns = {
            strategy: round(predict(plan, shape, self.hardware, self.nodes, self.layout).total_s * 1e9)
            for strategy, plan in plans.items()
        }
        best = min(ns, key=ns.__getitem__)
        if current in ns and ns[current] * (1 - HYSTERESIS) <= ns[best]:
            best = current
        return plans[best]
