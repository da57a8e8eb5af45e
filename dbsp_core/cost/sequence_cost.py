"""What several sequences cost on a machine, and what a plan for them makes each rank compute and send.

Arithmetic on counts and on constants from a file: every rank that has both gets the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import cast

import numpy as np

from dbsp_core.cost.machine import Constants, Hardware
from dbsp_core.cost.prediction import Topology, block_s, exchange_s, require_network, traffic_of
from dbsp_core.layout.sequence_layout import SequenceLayout
from dbsp_core.layout.strategy import Strategy
from dbsp_core.masks.block_mask import BlockMask
from dbsp_core.masks.grid import BlockGrid
from dbsp_core.models.table import ModelSpec
from dbsp_core.planning.assignment import Assignment
from dbsp_core.planning.bags import BagTopology
from dbsp_core.planning.chunks import Chunks
from dbsp_core.planning.planners import imbalance_ratio, plan_rows
from dbsp_core.planning.sequences import PICO, SequenceCost, SequencePlan
from dbsp_core.planning.wire_format import MODEL, WireFormat
from dbsp_core.sources import DenseSource, MaskRequest, MaskSource, StaticMaskSource
from dbsp_core.utils.errors import UserError

__all__ = [
    "FLOP_COUNTS",
    "LayerSize",
    "SequencePlanMetrics",
    "SequenceWork",
    "WorkOfSizes",
    "bag_layout",
    "evaluate",
    "even_owners",
    "fastest_bags",
    "sequence_cost",
    "whole_layout",
]


@dataclass(frozen=True)
class LayerSize:
    """A transformer's layer, all layers being alike.

    Attributes:
        token_flops: FLOP a token of everything but self-attention's scores and values.
        text: Whether text tokens are part of self-attention's sequence.
        element_bytes: Of a number of the hidden states, and of q, k and v.
        wire: How q, k and v are written on their way.
    """

    layers: int
    heads: int
    head_dim: int
    token_flops: float
    text: bool = True
    element_bytes: int = 2
    wire: WireFormat = MODEL

    @classmethod
    def of(cls, model: ModelSpec) -> LayerSize:
        token_flops = model.linear_flops / (model.layers * model.tokens)
        return cls(model.layers, model.heads, model.head_dim, token_flops, model.text_tokens > 0)

    @property
    def width(self) -> int:
        return self.heads * self.head_dim


FLOP_COUNTS = Hardware(
    name="FLOP counts",
    device="any",
    dtype="bfloat16",
    constants=Constants(
        flops_per_s=1e15,
        score_s=0.0,
        row_s=0.0,
        launch_s=0.0,
        call_s=0.0,
        pack_bytes_per_s=math.inf,
        merge_bytes_per_s=math.inf,
        exchange_latency_s=0.0,
        exchange_bytes_per_s=math.inf,
        p2p_latency_s=0.0,
        p2p_bytes_per_s=math.inf,
        overlap=1.0,
        linear_flops_per_s=1e15,
        network_latency_s=0.0,
        network_bytes_per_s=math.inf,
    ),
    sources=dict.fromkeys((one.name for one in fields(Constants)), "assumed"),
)
"""Costs of sequences without a machine's constants: attention and all else by FLOP, and exchanges for nothing."""


def sequence_cost(layer: LayerSize, hardware: Hardware, block_q: int = 64, block_k: int = 64) -> SequenceCost:
    """Seconds a token and a dense block from the machine's constants."""
    known = hardware.constants
    token_s = layer.token_flops / known.linear_flops_per_s + layer.heads * known.row_s / block_q
    return SequenceCost(token_s, block_s(block_q, block_k, layer.head_dim, known))


WorkOfSizes = dict[MaskRequest, tuple[BlockGrid, np.ndarray]]
"""By what masks were asked for: their grid, and int64[H, nq], dense blocks of each row."""


@dataclass(frozen=True, eq=False)
class SequenceWork:
    """What each sequence's attention computes. No bits: numbers of a mask's rows are all that is kept.

    Attributes:
        grids: Of each sequence.
        row_work: int64[H, nq] of each, dense blocks by (head, query block).
    """

    grids: tuple[BlockGrid, ...]
    row_work: tuple[np.ndarray, ...]

    @classmethod
    def of(cls, masks: Sequence[BlockMask]) -> SequenceWork:
        return cls(tuple(mask.grid for mask in masks), tuple(mask.counts.rows for mask in masks))

    @classmethod
    def dense(cls, grids: Sequence[BlockGrid], heads: int, density: float = 1.0) -> SequenceWork:
        """All blocks of every row, or as many of each as a density comes to, at least one."""
        rows = (np.full((heads, grid.nq), max(1, round(grid.nk * density)), dtype=np.int64) for grid in grids)
        return cls(tuple(grids), tuple(rows))

    @classmethod
    def under(
        cls, source: MaskSource, requests: Sequence[MaskRequest], known: WorkOfSizes, density: float = 1.0
    ) -> SequenceWork:
        """What sequences compute under a source's masks.

        Args:
            requests: One for each sequence.
            known: Of requests that came before; those that are new are added. Of one source.
            density: Assumed of masks that are predicted from queries and keys.

        Raises:
            UserError: For a size that the source refuses.
        """
        found = []
        for request in requests:
            if request not in known and (isinstance(source, DenseSource) or source.changes == "per_call"):
                dense = cls.dense([source.grid(request)], request.heads, density)
                found.append((dense.grids[0], dense.row_work[0]))
                continue
            if request not in known:
                mask = cast(StaticMaskSource, source).mask(request)
                known[request] = mask.grid, mask.counts.rows
            found.append(known[request])
        grids, rows = zip(*found, strict=True)
        return cls(grids, rows)

    @property
    def tokens(self) -> np.ndarray:
        """int64[n]"""
        return np.array([grid.tokens for grid in self.grids], dtype=np.int64)

    @property
    def blocks(self) -> np.ndarray:
        """int64[n]: dense blocks of all heads."""
        return np.array([int(rows.sum()) for rows in self.row_work], dtype=np.int64)


@dataclass(frozen=True, eq=False)
class SequencePlanMetrics:
    """The numbers of a plan, of one layer's forward pass.

    Attributes:
        tokens, blocks: int64[world], what each rank holds, and the dense blocks it computes.
        picoseconds: int64[world], both together as `SequenceCost` has them.
        rho: ρ_s of the attention of the bag where it is highest; ranks wait for each other within bags.
        rehomed_bytes: Hidden states that go from the ranks that loaded them to others, once.
        between_nodes_bytes: Of them, to other nodes.
        sent_bytes: float64[world], q, k, v and outputs that each rank sends in the bags' exchanges.
        seconds: Of the slowest bag: its slowest rank's computing, and its exchanges.
    """

    tokens: np.ndarray
    blocks: np.ndarray
    picoseconds: np.ndarray
    rho: float
    rehomed_bytes: int
    between_nodes_bytes: int
    sent_bytes: np.ndarray
    seconds: float

    @property
    def wir(self) -> float:
        """Workload imbalance ratio (KnapFormer §4.2): most over least of the ranks' costs; infinite with one idle."""
        least = int(self.picoseconds.min())
        return int(self.picoseconds.max()) / least if least else float("inf")


def even_owners(rows: np.ndarray, ranks: int) -> np.ndarray:
    """Returns int64[H, nq], the rank of a bag that computes each row, from rows int64[H, nq], dense blocks."""
    if ranks == 1:
        return np.zeros(rows.shape, dtype=np.int64)
    return plan_rows(rows, np.zeros(rows.shape[1], dtype=np.int64), ranks, 1)


def evaluate(
    plan: SequencePlan,
    work: SequenceWork,
    loader: np.ndarray,
    cost: SequenceCost,
    layer: LayerSize,
    hardware: Hardware,
    node_size: int = 8,
    owners: Callable[[np.ndarray, int], np.ndarray] = even_owners,
) -> SequencePlanMetrics:
    """Counts what a plan makes each rank do. Attention is shared by heads and rows within each bag (Ulysses).

    Args:
        loader: int64[n], the rank that loads each sequence.
        owners: Shares out a bag's rows over its ranks; see `even_owners`.
    """
    topology, token_bytes = plan.topology, layer.head_dim * layer.element_bytes
    both_ways = np.array([layer.wire.token_bytes(layer.head_dim, layer.element_bytes), token_bytes])
    lengths = work.tokens
    tokens, blocks = plan.runs.by_rank(topology.world), np.zeros(topology.world, dtype=np.int64)
    sent_bytes, rhos, exchanges = np.zeros(topology.world), [1.0], np.zeros(len(topology.ranks))
    for bag, (first, ranks) in enumerate(zip(topology.first_rank.tolist(), topology.ranks.tolist(), strict=True)):
        here, own = slice(first, first + ranks), np.flatnonzero(plan.bag == bag)
        if not len(own):
            continue
        rows = np.concatenate([work.row_work[one] for one in own], axis=1)
        owner = owners(rows, ranks)
        blocks[here] = np.bincount(owner.ravel(), rows.ravel(), ranks).astype(np.int64)
        if ranks == 1:
            continue
        rhos.append(imbalance_ratio(blocks[here]))
        sent = _sent(owner, [work.grids[one] for one in own], bag_layout(plan, lengths, bag))
        sent = sent * both_ways[:, None, None]
        both = sent.sum(axis=0)
        sent_bytes[here] = both.sum(axis=1) - both.diagonal()
        exchanges[bag] = sum(_exchange_s(matrix, first, hardware, node_size) for matrix in sent)
    picoseconds = cost.picoseconds(tokens, blocks)
    slowest = np.maximum.reduceat(picoseconds, topology.first_rank) / PICO + exchanges
    moved, apart = plan.runs.moved(loader, node_size)
    hidden = layer.width * layer.element_bytes
    return SequencePlanMetrics(
        tokens, blocks, picoseconds, max(rhos), moved * hidden, apart * hidden, sent_bytes, float(slowest.max())
    )


def fastest_bags(
    plan: Callable[[BagTopology], SequencePlan],
    work: SequenceWork,
    loader: np.ndarray,
    cost: SequenceCost,
    layer: LayerSize,
    hardware: Hardware,
    world: int,
    node_size: int,
    slack: float = 0.0,
) -> SequencePlan:
    """Plans every topology of `BagTopology.candidates`, and returns the plan whose slowest bag takes least.

    With `slack`, that is the first plan that takes at most this share more than the best. Small bags come first.

    Deterministic: ranks with equal arguments choose the same.

    Args:
        plan: Shares out the sequences over bags; raises UserError where none can hold one.
        work: See `evaluate`, as for loader, cost, layer and hardware.
        world: Number of ranks.
        node_size: Of them on a node.
        slack: What smaller bags may cost, as their exchanges are smaller, if the constants know nothing of exchanges.

    Raises:
        UserError: Where no topology can hold the sequences.
    """
    plans: list[SequencePlan] = []
    refused: UserError | None = None
    for topology in BagTopology.candidates(world, node_size):
        try:
            plans.append(plan(topology))
        except UserError as error:
            refused = error
    if refused is not None and not plans:
        raise refused
    seconds = [evaluate(one, work, loader, cost, layer, hardware, node_size).seconds for one in plans]
    most = min(seconds) * (1 + slack)
    return next(plan for plan, one in zip(plans, seconds, strict=True) if one <= most)


def whole_layout(plan: SequencePlan, tokens: np.ndarray) -> SequenceLayout:
    """Which of all ranks holds which token of all sequences, packed one after another.

    A rank has its tokens at the places that `bag_layout` gives them.
    """
    rank, local = plan.runs.token_homes(tokens)
    return SequenceLayout(rank, local, plan.topology.world, int(local.max()) + 1)


def bag_layout(plan: SequencePlan, tokens: np.ndarray, bag: int) -> SequenceLayout:
    """Which of a bag's ranks holds which token of its sequences, packed one after another in their order.

    Raises UserError for a bag without sequences.

    Args:
        tokens: int64[n], of all sequences.
    """
    own = np.flatnonzero(plan.bag == bag)
    if not len(own):
        raise UserError(f"bag {bag} of {plan.topology} has no sequences, hence no layout; leave it out")
    first, ranks = int(plan.topology.first_rank[bag]), int(plan.topology.ranks[bag])
    runs = plan.runs.within(own, first)
    rank, local = runs.token_homes(tokens[own])
    return SequenceLayout(rank, local, ranks, int(local.max()) + 1)


def _sent(owner: np.ndarray, grids: list[BlockGrid], layout: SequenceLayout) -> np.ndarray:
    """float64[2, b, b]: tokens of one head from rank (row) to rank (column), to owners and back."""
    grid, strategy = BlockGrid.packed(grids), Strategy(layout.world, 1)
    home = np.zeros(grid.nk, dtype=np.int64)
    assignment = Assignment(strategy, grid, owner, Chunks.of_heads(owner, home, strategy))
    traffic = traffic_of(assignment, layout)
    return np.stack([traffic.dispatch, traffic.combine])


def _exchange_s(sent: np.ndarray, first: int, hardware: Hardware, node_size: int) -> float:
    """Seconds of an all-to-all in a bag that begins with rank `first`, from sent float64[b, b], bytes."""
    before, ranks = first % node_size, len(sent)
    if before + ranks <= node_size:
        return exchange_s(sent, hardware.constants, Topology(ranks, ranks))
    topology = Topology(before + ranks, node_size)  # the ranks before it in its node send nothing
    require_network(hardware, topology)
    return exchange_s(np.pad(sent, ((before, 0), (before, 0))), hardware.constants, topology)
