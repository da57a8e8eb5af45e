"""The latency of one attention, from its plan: Eq. 4 of the paper (§4.3) as corrected, see docs/latency-model.md.

Pure arithmetic on the plan and on constants from a file: every rank that has both predicts the same bits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from dbsp_core.comm.all_to_all import exchange_q_separately
from dbsp_core.comm.token_mean import mean_bytes
from dbsp_core.cost.chunk_times import ChunkTimes, chunk_times
from dbsp_core.cost.comm_volume import Traffic, traffic_of
from dbsp_core.cost.hardware import Constants, Hardware
from dbsp_core.layout.sequence_layout import SequenceLayout
from dbsp_core.planning.chunks import ALL
from dbsp_core.planning.plan import Plan
from dbsp_core.planning.wire_format import MODEL, WireFormat
from dbsp_core.utils.errors import UserError

__all__ = ["AttentionShape", "Prediction", "Topology", "predict"]

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
    traffic = traffic or traffic_of(plan.assignment, layout)
    dispatched = [traffic.dispatch]
    if exchange_q_separately(plan.assignment):
        dispatched = [traffic.queries, 2 * traffic.keys[0]]
    sent_bytes = shape.sent_bytes(plan.assignment.wire)
    exchanged = [*(tokens * sent_bytes for tokens in dispatched), traffic.combine * shape.token_bytes]
    if plan.assignment.wire.centred:
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
    seconds: np.ndarray = plan.metrics.work * (
        shape.batch * block_s(grid.block_q, grid.block_k, shape.head_dim, known)
    )
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
    wire, token = plan.assignment.wire, shape.token_bytes
    placed = traffic.rows * plan.grid.block_q + 2 * traffic.blocks.sum(axis=0) * plan.grid.block_k
    packed = placed + traffic.rows * plan.grid.block_q
    first, *further = (sent.sum(axis=1) for sent in traffic.key_exchanges)
    at_home = 2 * shape.heads * layout.shard + first
    if further:  # a rank that sends one ring rank after another the same keys packs them once
        alike = (plan.assignment.chunks.keys == ALL) & (np.ptp(further, axis=0) == 0)
        at_home = at_home + np.where(alike, further[0], np.sum(further, axis=0))
    total = (at_home + packed) * token
    if wire is not MODEL:
        total = total + placed * shape.sent_bytes(wire)
    if wire.centred:
        total = total + shape.heads * layout.shard * token
    return float(np.max(total))
