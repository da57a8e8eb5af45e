"""Counts of each rank's work and bytes under plans for several sequences; and KnapFormer's Eq. 2."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from dbsp_core.cost.prediction import traffic_of
from dbsp_core.cost.sequence_cost import LayerSize, SequenceWork, bag_layout
from dbsp_core.layout.sequence_layout import SequenceLayout
from dbsp_core.layout.strategy import Strategy
from dbsp_core.masks.block_mask import BlockMask
from dbsp_core.masks.grid import BlockGrid
from dbsp_core.planning.balance import imbalance_ratio
from dbsp_core.planning.chunks import Chunks
from dbsp_core.planning.plan import Plan
from dbsp_core.planning.planners import Problem, dbsp, head_price
from dbsp_core.planning.sequences import SequenceCost, SequencePlan, TokenRuns


def gamma_corrected(width: int, gamma: float, flops_per_s: float = 1e15, heads: int = 1) -> SequenceCost:
    """KnapFormer's Eq. 2 for a model of width d and blocks of 1 × 1 tokens; `heads` share a pair's 4·d FLOP."""
    return SequenceCost(24 * width**2 / flops_per_s, gamma * 4 * width / flops_per_s / heads)


def work_of(masks: Sequence[BlockMask]) -> SequenceWork:
    return SequenceWork(tuple(mask.grid for mask in masks), tuple(mask.counts.rows for mask in masks))


def moved_tokens(runs: TokenRuns, loader: np.ndarray, node_size: int) -> tuple[int, int]:
    """Numbers of tokens that another rank has loaded, and of those from another node; `loader` is by sequence."""
    source = loader[runs.sequence]
    apart = source // node_size != runs.rank // node_size
    return int(runs.length[source != runs.rank].sum()), int(runs.length[apart].sum())


def balanced_owners(rows: np.ndarray, grids: list[BlockGrid], ranks: int) -> np.ndarray:
    """Returns int64[H, nq], the rank of a bag that computes each row, from int64[H, nq] active blocks of rows."""
    if ranks == 1:
        return np.zeros(rows.shape, dtype=np.int64)
    strategy, holder = Strategy(ranks, 1), np.zeros(rows.shape[1], dtype=np.int64)
    return dbsp(Problem(strategy, rows, holder, head_price(BlockGrid.packed(grids), strategy)))


def sent_in_bag(owner: np.ndarray, grids: list[BlockGrid], layout: SequenceLayout, layer: LayerSize) -> np.ndarray:
    """Returns float64[2, b, b]: bytes from rank (row) to rank (column) in the exchanges to owners and back."""
    grid, strategy = BlockGrid.packed(grids), Strategy(layout.world, 1)
    chunks = Chunks.of_heads(owner, np.zeros(grid.nk, dtype=np.int64), strategy)
    not_counted = np.zeros(layout.world, dtype=np.int64)
    traffic = traffic_of(Plan(strategy, grid, owner, chunks, "contiguous", not_counted), layout)
    sizes = layer.head_dim, layer.element_bytes
    to_owners = traffic.dispatch * layer.comm_dtype.token_bytes(*sizes)
    return np.stack([to_owners, traffic.queries.T * layer.comm_dtype.out_bytes(*sizes)])


@dataclass(frozen=True, eq=False)
class SequencePlanMetrics:
    """The numbers of a plan, of one layer's forward pass."""

    tokens: np.ndarray  # int64[world], what each rank holds
    blocks: np.ndarray  # int64[world], the active blocks that it computes
    picoseconds: np.ndarray  # int64[world], both together as `SequenceCost` has them
    rho: float  # ρ_s of the attention of the bag where it is highest; ranks wait for each other within bags
    moved: int  # tokens that go from the ranks that loaded them to others, once
    sent_bytes: np.ndarray  # float64[world], q, k, v and outputs that each rank sends in the bags' exchanges

    @property
    def wir(self) -> float:
        """Workload imbalance ratio (KnapFormer §4.2): most over least of the ranks' costs; infinite with one idle."""
        least = int(self.picoseconds.min())
        return int(self.picoseconds.max()) / least if least else float("inf")


def evaluate(
    plan: SequencePlan,
    work: SequenceWork,
    loader: np.ndarray,
    cost: SequenceCost,
    layer: LayerSize,
    owners: Callable[[np.ndarray, list[BlockGrid], int], np.ndarray] = balanced_owners,
) -> SequencePlanMetrics:
    """Counts what a plan makes each rank do. Heads and rows are shared within each bag (Ulysses).

    Args:
        loader: int64[n], the rank that loads each sequence.
        owners: Assigns a bag's rows to its ranks; see `balanced_owners`.
    """
    topology = plan.topology
    tokens, blocks = plan.runs.by_rank(topology.world), np.zeros(topology.world, dtype=np.int64)
    sent_bytes, rhos = np.zeros(topology.world), [1.0]
    for bag, (first, ranks) in enumerate(zip(topology.first_rank.tolist(), topology.ranks.tolist(), strict=True)):
        ranks_of_bag, members = slice(first, first + ranks), np.flatnonzero(plan.bag == bag)
        if not len(members):
            continue
        rows = np.concatenate([work.row_work[sequence] for sequence in members], axis=1)
        grids = [work.grids[sequence] for sequence in members]
        owner = owners(rows, grids, ranks)
        blocks[ranks_of_bag] = np.bincount(owner.ravel(), rows.ravel(), ranks).astype(np.int64)
        if ranks == 1:
            continue
        rhos.append(imbalance_ratio(blocks[ranks_of_bag]))
        layout = bag_layout(plan, work.tokens, bag)
        both = sent_in_bag(owner, grids, layout, layer).sum(axis=0)
        sent_bytes[ranks_of_bag] = both.sum(axis=1) - both.diagonal()
    moved = moved_tokens(plan.runs, loader, 1)[0]
    return SequencePlanMetrics(tokens, blocks, cost.picoseconds(tokens, blocks), max(rhos), moved, sent_bytes)
