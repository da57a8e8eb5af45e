"""Who sends how much to whom: the bytes of a plan, counted from blocks, in microseconds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import zip_longest

import numpy as np
import torch

from dbsp_core.comm.exchange import exchange_q_separately, mean_bytes
from dbsp_core.cost.machine import Constants, Hardware
from dbsp_core.layout.sequence_layout import SequenceLayout, ShardSegments
from dbsp_core.masks.grid import BlockAxis, BlockGrid, Order
from dbsp_core.planning.chunks import ALL
from dbsp_core.planning.plan import Plan
from dbsp_core.planning.wire_format import MODEL, WireFormat
from dbsp_core.utils.errors import UserError

__all__ = [
    "AttentionShape",
    "ChunkTimes",
    "Prediction",
    "Topology",
    "Traffic",
    "chunk_times",
    "copies_by_rank",
    "of_the_last",
    "predict",
    "tokens_at",
    "traffic_of",
]


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


def traffic_of(plan: Plan, layout: SequenceLayout) -> Traffic:
    """Counts what a plan moves under `layout`. Raises ValueError when they do not fit each other."""
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
        q_home, k_home = tokens_at(layout, grid, order)
        queries += q_home.T @ copies_by_rank(plan.owner[heads], strategy.world).T
        for chunk, copies in enumerate(chunks.copies(heads)):
            keys[chunk] += k_home.T @ copies.T
            blocks[chunk] += copies.sum(axis=1, dtype=np.int64)
    rows = np.bincount(plan.owner.ravel(), minlength=strategy.world)
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


@dataclass(frozen=True)
class ChunkTimes:
    """All chunks of one attention.

    Attributes:
        chunks: (compute_s, transfer_s) of each on the rank that is done last; compute includes the kernel's launch and
            the merge, the transfer is what the next chunk needs: 0 in the last.
        attention_s: From the first kernel's start until the last rank is done.
    """

    chunks: tuple[tuple[float, float], ...]
    attention_s: float

    @property
    def compute_s(self) -> float:
        """Compute of all chunks of the rank that is done last, as if it waited for nothing."""
        return sum(compute for compute, _ in self.chunks)

    @property
    def exposed_s(self) -> float:
        """What that rank waits: for transfers that compute does not hide, and in lockstep for its neighbours."""
        return self.attention_s - self.compute_s


def chunk_times(compute: np.ndarray, transfers: Sequence[float], overlap: float) -> ChunkTimes:
    """Ranks wait for further chunks alone: one is there when the busiest rank's is, requested a kernel before its own.

    Args:
        compute: float64[chunks, P], seconds.
        transfers: Seconds of the exchange of each chunk after the first.
        overlap: Share of the shorter of compute and transfer that hides behind the longer.
    """
    done = np.zeros(compute.shape[1])
    for kernel_s, transfer_s in zip(compute, [*transfers, 0.0], strict=True):
        done = np.maximum(done + kernel_s, done + transfer_s)
    hidden = compute.sum(axis=0) + sum(transfers) - done
    return of_the_last(compute, transfers, done + (1 - overlap) * hidden)


def of_the_last(compute: np.ndarray, transfers: Sequence[float], done: np.ndarray) -> ChunkTimes:
    """Returns the times of the rank that is done last, from `done` float64[P] and the arguments of `chunk_times`."""
    last = int(done.argmax())
    chunks = tuple((float(c), float(t)) for c, t in zip_longest(compute[:, last], transfers, fillvalue=0.0))
    return ChunkTimes(chunks, float(done[last]))


MERGE_BYTES = 12
"""Bytes of memory per output element that a merge touches: two float32 read, one written."""


@dataclass(frozen=True)
class AttentionShape:
    """Sizes of q, k, v and the output, over all ranks.

    Attributes:
        heads: The plan's; where each batch item has masks of its own, they are the plan's heads and batch is 1.
    """

    batch: int
    heads: int
    tokens: int
    head_dim: int
    element_bytes: int = 2

    def __post_init__(self) -> None:
        for name in ("batch", "heads", "tokens", "head_dim", "element_bytes"):
            if getattr(self, name) < 1:
                raise UserError(f"attention shape: {name}={getattr(self, name)} must be at least 1")

    @classmethod
    def of(cls, q: torch.Tensor, heads: int, tokens: int) -> AttentionShape:
        """The shape with this rank's q [B, H, n_local, D], where plan or mask has `heads` heads, H or B·H."""
        batch, own, _, head_dim = q.shape
        return cls(batch if heads == own else 1, heads, tokens, head_dim, q.element_size())

    @property
    def token_bytes(self) -> int:
        """Bytes of one token of one head, over the batch: of q, k, v or the output, in memory."""
        return self.batch * self.head_dim * self.element_bytes

    def sent_bytes(self, wire: WireFormat) -> int:
        """The same of q, k or v as it is written on its way."""
        return self.batch * wire.token_bytes(self.head_dim, self.element_bytes)


@dataclass(frozen=True)
class Topology:
    """`world` ranks, at most `node_size` to a node, in the order of ranks.

    Attributes:
        node_of: The node of each rank, where they don't simply follow one another, as in a group of every other rank.
    """

    world: int
    node_size: int = 8
    node_of: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.world < 1 or self.node_size < 1:
            raise UserError(f"a topology needs at least one rank and one rank a node, got {self}")
        if self.node_of is not None and len(self.node_of) != self.world:
            raise UserError(f"a topology of {self.world} ranks needs a node for each, got {self.node_of}")

    @classmethod
    def on(cls, hardware: Hardware, world: int) -> Topology:
        """`world` ranks on nodes of this machine."""
        return cls(world, hardware.gpus_per_node or 8)

    @classmethod
    def of_nodes(cls, node_of: Sequence[int]) -> Topology:
        """Ranks on these nodes, given for each rank."""
        return cls(len(node_of), max(Counter(node_of).values()), tuple(node_of))

    @property
    def nodes(self) -> np.ndarray:
        """int64[world]: the node of each rank."""
        return np.arange(self.world) // self.node_size if self.node_of is None else np.array(self.node_of)

    @property
    def one_node(self) -> bool:
        return len(np.unique(self.nodes)) == 1


@dataclass(frozen=True)
class Prediction:
    """Seconds of one attention on all ranks together: exchanges wait for the slowest.

    Attributes:
        exchange_s: Exchanges to owners and back home.
        times: The chunks between them.
        pack_s: Gathering into exchange buffers and placing from them.
        launch_s: Launches outside of chunks.
    """

    exchange_s: float
    times: ChunkTimes
    pack_s: float
    launch_s: float

    @property
    def total_s(self) -> float:
        return self.exchange_s + self.pack_s + self.launch_s + self.times.attention_s


def predict(
    plan: Plan,
    shape: AttentionShape,
    hardware: Hardware,
    topology: Topology | None = None,
    layout: SequenceLayout | None = None,
    traffic: Traffic | None = None,
) -> Prediction:
    """The corrected form of Eq. 4: every rank's real work, real bytes, real packing.

    Args:
        topology: Default: one node.
        layout: The layout the plan was made for, which decides what travels. Default: contiguous.
        traffic: What travels, where it is known already.

    Raises:
        UserError: When plan, shape and topology don't fit, or network constants are needed but not known.
    """
    strategy, known = plan.strategy, hardware.constants
    topology = topology or Topology(strategy.world, strategy.world)
    layout = layout or SequenceLayout.contiguous(plan.grid.tokens, strategy.world)
    require_fit(plan, shape, topology)
    require_network(hardware, topology)
    traffic = traffic or traffic_of(plan, layout)
    dispatched = [traffic.dispatch]
    if exchange_q_separately(plan):
        dispatched = [traffic.queries, 2 * traffic.keys[0]]
    sent_bytes = shape.sent_bytes(plan.wire)
    exchanged = [*(tokens * sent_bytes for tokens in dispatched), traffic.combine * shape.token_bytes]
    if plan.wire.centred:
        exchanged.append(_of_means(shape, strategy.world))
    compute, fetches = _compute_s(plan, traffic, shape, known), fetches_s(traffic, sent_bytes, known, topology)
    return Prediction(
        exchange_s=sum(exchange_s(sent, known, topology) for sent in exchanged),
        times=chunk_times(compute, fetches, known.overlap),
        pack_s=packed_bytes(plan, traffic, layout, shape) / known.pack_bytes_per_s,
        launch_s=known.call_s,
    )


def require_fit(plan: Plan, shape: AttentionShape, topology: Topology) -> None:
    plan.strategy.require_world(topology.world)
    if (shape.heads, shape.tokens) != (plan.heads, plan.grid.tokens):
        raise UserError(
            f"the plan is for {plan.heads} heads and {plan.grid.tokens} tokens, the shape has {shape.heads} and "
            f"{shape.tokens}; give the plan's"
        )


def require_network(hardware: Hardware, topology: Topology) -> None:
    if not topology.one_node and hardware.constants.network_bytes_per_s is None:
        raise UserError(
            f"{topology.world} ranks on nodes of {topology.node_size} need network constants, which hardware "
            f"{hardware.name!r} lacks; add network_latency_s and network_bytes_per_s, or use one node"
        )


def exchange_s(sent: np.ndarray, known: Constants, topology: Topology) -> float:
    """Seconds of one all-to-all: the busiest rank's bytes, sent or received. NVLink and network work at the same time.

    Args:
        sent: float64[P, P], bytes from rank (row) to rank (column); what stays on a rank does not travel.
    """
    if topology.world == 1:
        return 0.0
    nodes = topology.nodes
    near = nodes[:, None] == nodes
    inside = _busiest(np.where(near & ~np.eye(topology.world, dtype=bool), sent, 0))
    seconds = known.exchange_latency_s + inside / known.exchange_bytes_per_s
    if known.network_bytes_per_s is None or known.network_latency_s is None or near.all():
        return seconds
    return max(seconds, known.network_latency_s + _busiest(np.where(near, 0, sent)) / known.network_bytes_per_s)


def _busiest(sent: np.ndarray) -> float:
    return float(max(sent.sum(axis=0).max(), sent.sum(axis=1).max()))


def fetches_s(traffic: Traffic, sent_bytes: int, known: Constants, topology: Topology) -> list[float]:
    """Seconds of each exchange of further keys, of so many bytes a token, beside the kernel on the chunk before."""
    # In a chunk a rank sends to the few ranks of one ring rank, and receives from those of another.
    pairwise = replace(known, exchange_latency_s=known.p2p_latency_s, exchange_bytes_per_s=known.p2p_bytes_per_s)
    return [exchange_s(sent * sent_bytes, pairwise, topology) for sent in traffic.key_exchanges[1:]]


def _of_means(shape: AttentionShape, world: int) -> np.ndarray:
    """float64[P, P], bytes that ranks send one another for the mean of all keys."""
    return np.full((world, world), float(mean_bytes(shape.batch, shape.heads, shape.head_dim, 2)))


def _compute_s(plan: Plan, traffic: Traffic, shape: AttentionShape, known: Constants) -> np.ndarray:
    """float64[chunks, P]: launch, blocks, rows, and from the second chunk on the merge.

    A rank's work is spread over its chunks as its KV blocks are: only its sum is counted.
    """
    grid = plan.grid
    share = traffic.blocks / np.maximum(1, traffic.blocks.sum(axis=0))
    seconds: np.ndarray = plan.work * (shape.batch * block_s(grid.block_q, grid.block_k, shape.head_dim, known))
    rank_s: np.ndarray = share * seconds
    rank_s += traffic.rows * (shape.batch * known.row_s)
    merge_s = traffic.rows * (grid.block_q * shape.batch * shape.head_dim * MERGE_BYTES / known.merge_bytes_per_s)
    rank_s[1:] += merge_s
    return rank_s + known.launch_s


def block_s(block_q: int, block_k: int, head_dim: int, known: Constants) -> float:
    """Seconds of one dense block: two products of 2·Bq·Bk·D FLOP, and the scores' softmax."""
    return block_q * block_k * (4 * head_dim / known.flops_per_s + known.score_s)


def packed_bytes(plan: Plan, traffic: Traffic, layout: SequenceLayout, shape: AttentionShape) -> float:
    """Bytes of the rank that gathers and places most: q, k, v and output at home, and the same packed at their owner.

    Needed keys are gathered once for each of their readers. What is written otherwise on its way is placed as it came,
    and then read; and keys that travel less their mean are read once more before.
    """
    wire, token = plan.wire, shape.token_bytes
    placed = traffic.rows * plan.grid.block_q + 2 * traffic.blocks.sum(axis=0) * plan.grid.block_k
    packed = placed + traffic.rows * plan.grid.block_q
    first, *further = (sent.sum(axis=1) for sent in traffic.key_exchanges)
    at_home = 2 * shape.heads * layout.shard + first
    if further:  # a rank that sends one ring rank after another the same keys packs them once
        alike = (plan.chunks.keys == ALL) & (np.ptp(further, axis=0) == 0)
        at_home = at_home + np.where(alike, further[0], np.sum(further, axis=0))
    total = (at_home + packed) * token
    if wire is not MODEL:
        total = total + placed * shape.sent_bytes(wire)
    if wire.centred:
        total = total + shape.heads * layout.shard * token
    return float(np.max(total))
