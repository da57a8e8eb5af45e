"""Where blocks are outside attention, and who owns rows in plain Ulysses, Ring and USP."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from dbsp_core.layout.sequence_layout import SequenceLayout, ShardSegments
from dbsp_core.layout.strategy import Strategy
from dbsp_core.masks.block_mask import BlockMask, require_mask
from dbsp_core.masks.grid import CANONICAL, BlockAxis, BlockGrid, Order
from dbsp_core.planning.assignment import Assignment
from dbsp_core.planning.chunks import ALL, NEEDED, Chunks, require_keys
from dbsp_core.planning.heads import contiguous_heads
from dbsp_core.planning.planners import (
    Problem,
    balanced_majority_rank,
    head_price,
    imbalance_ratio,
    majority_rank,
    require_planner,
    rho_bound,
    work_by_rank,
)
from dbsp_core.planning.wire_format import require_wire_format
from dbsp_core.utils.errors import UserError
from dbsp_core.utils.process import not_compiled

__all__ = [
    "Plan",
    "PlanMetrics",
    "block_positions",
    "majority_ring_ranks",
    "make_plan",
    "plain_owners",
]


@lru_cache(maxsize=16)
def plain_owners(grid: BlockGrid, heads: int, strategy: Strategy) -> np.ndarray:
    """int64[H, nq]: the rank of each row without db-SP: heads in equal runs, blocks in contiguous shards."""
    layout = SequenceLayout.contiguous(grid.tokens, strategy.world)
    home, _ = majority_ring_ranks(layout, grid, heads, strategy)
    (owner,) = _read_only((home * strategy.ulysses + contiguous_heads(heads, strategy.ulysses)[:, None],))
    return owner


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
        q_ring, k_ring = _read_only(by_order(grid.common_order))
        return q_ring, k_ring
    q_ring, k_ring = (np.empty((heads, len(axis)), dtype=np.int64) for axis in (grid.q_axis, grid.k_axis))
    for order, in_order in grid.order_groups(heads):
        q_ring[in_order], k_ring[in_order] = by_order(order)
    q_ring, k_ring = _read_only((q_ring, k_ring))
    return q_ring, k_ring


def block_positions(grid: BlockGrid) -> np.ndarray:
    """Returns float64[nq], the mean canonical position of each query block's tokens.

    If heads have token orders of their own, positions follow these orders, which keep what is attended to together.
    """
    if grid.common_order is None:
        return np.arange(float(grid.nq))
    return np.add.reduceat(grid.token_permutation(grid.common_order), grid.q_axis.starts) / grid.q_axis.lengths


def _read_only(arrays: tuple[np.ndarray, ...]) -> tuple[np.ndarray, ...]:
    """The same arrays, protected: all plans made from them share them."""
    for array in arrays:
        array.flags.writeable = False
    return arrays


@dataclass(frozen=True, eq=False, repr=False)
class PlanMetrics:
    """The numbers of an assignment for one mask. Ranks wait for one another at the end alone: all are of totals.

    Attributes:
        work: int64[P], dense blocks of each rank.
        baseline_work: int64[P], the same without db-SP; None where comparing was left out.
        rho_bound: ρ_s that no plan of whole rows can beat; NaN where comparing was left out.
    """

    work: np.ndarray
    baseline_work: np.ndarray | None
    rho_bound: float

    @classmethod
    def of(cls, assignment: Assignment, mask: BlockMask, *, compare: bool) -> PlanMetrics:
        """Counts the blocks of `mask`; to `compare`, also those of the contiguous plan, and the bound."""
        assignment.require_fit(mask)
        world, rows = assignment.strategy.world, mask.counts.rows
        work = work_by_rank(assignment.q_owner, rows, world)
        if not compare:
            return cls(work, None, float("nan"))
        without = plain_owners(mask.grid, mask.heads, assignment.strategy)
        return cls(work, work_by_rank(without, rows, world), rho_bound(rows, world))

    @property
    def compared(self) -> tuple[np.ndarray, np.ndarray]:
        """`work` and `baseline_work`. Raises RuntimeError where comparing was left out."""
        if self.baseline_work is None:
            raise RuntimeError("this plan was made without comparing it to the contiguous one")
        return self.work, self.baseline_work

    @property
    def rho(self) -> float:
        """ρ_s: what the slowest rank computes, over the mean."""
        return imbalance_ratio(self.work)

    @property
    def rho_before(self) -> float:
        """ρ_s without db-SP."""
        return float("nan") if self.baseline_work is None else imbalance_ratio(self.baseline_work)

    @property
    def summary(self) -> str:
        """ρ_s in words."""
        if self.baseline_work is None:
            return f"ρ_s {self.rho:.3f}"
        return f"ρ_s {self.rho_before:.3f} → {self.rho:.3f}, bound {self.rho_bound:.3f}"

    def __repr__(self) -> str:
        return f"<PlanMetrics of {int(self.work.sum())} dense blocks: {self.summary}>"


@dataclass(frozen=True, eq=False, repr=False)
class Plan:
    """An assignment, its numbers for a mask, and how it was made.

    Attributes:
        assignment: Which rank owns each row, and which keys come to it in which chunk.
        metrics: Its numbers for one mask.
        planner: The planner's name.
        moved: Share of rows whose owner's ring rank is not that of the rank that holds them outside attention.
        plan_ms: Time from counts to owners and chunks, milliseconds; counting blocks is not in it.
    """

    assignment: Assignment
    metrics: PlanMetrics
    planner: str
    moved: float
    plan_ms: float

    def __repr__(self) -> str:
        keys = "" if self.assignment.chunks.keys == ALL else ", needed keys"
        return f"<Plan {self.strategy} by {self.planner}{keys}: {self.metrics.summary}, moved {self.moved:.1%}>"

    @property
    def strategy(self) -> Strategy:
        return self.assignment.strategy

    @property
    def grid(self) -> BlockGrid:
        return self.assignment.grid

    @property
    def heads(self) -> int:
        return self.assignment.heads

    @property
    def rho(self) -> float:
        return self.metrics.rho

    @property
    def rho_before(self) -> float:
        return self.metrics.rho_before

    @property
    def rho_bound(self) -> float:
        return self.metrics.rho_bound

    @property
    def density(self) -> float:
        """Share of blocks that are dense."""
        return int(self.metrics.work.sum()) / (self.heads * self.grid.pairs)

    def fits(self, mask: BlockMask) -> bool:
        """Whether a mask has as many heads, on the same grid, and needs no keys that the plan leaves out."""
        return (self.heads, self.grid) == (mask.heads, mask.grid) and self.assignment.serves(mask)

    def evaluate(self, mask: BlockMask, *, compare: bool = True) -> Plan:
        """This assignment with the numbers of another mask of the same grid. No planning: `plan_ms` is 0."""
        metrics = PlanMetrics.of(self.assignment, mask, compare=compare)
        return replace(self, metrics=metrics, plan_ms=0.0)


@not_compiled
def make_plan(
    mask: BlockMask,
    strategy: Strategy | str,
    planner: str = "dbsp",
    *,
    layout: SequenceLayout | None = None,
    compare: bool = True,
    keys: str = ALL,
    precision: str = "model",
) -> Plan:
    """Plans one attention. Deterministic: equal arguments give equal plans on every rank.

    Args:
        mask: Its dense blocks, on any device.
        strategy: How many ranks share heads and how many form a ring, such as "U4R2" (paper §2.3).
        planner: A name from `dbsp_core.planning.planners.PLANNERS`.
        layout: Which rank holds which tokens before and after. Default: contiguous shards of ceil(tokens / P).
        compare: Whether to count what the contiguous plan would do, and what no plan could beat, as reports show them.
        keys: "all": each rank is sent all keys and values of its heads, in chunks, from where they live; or "needed":
            those that its rows need, and no others (as DSV does, Tan et al. 2025, §5.2). Planner "dbsp" then cuts rows
            into runs of tokens, and the plan serves masks only that need no further keys.
        precision: "model": queries, keys and values travel as they are; "int8": rounded, with a scale for each token
            and head, and without gradients. No plan assigns other rows for it.

    Returns:
        Owners of rows and chunks of keys, with their numbers for this mask.

    Raises:
        UserError: For an unknown planner, way of keys or precision, or a layout of another size.
    """
    require_mask(mask)
    strategy = Strategy.parse(strategy)
    require_keys(keys)
    wire = require_wire_format(precision)
    assign = require_planner(planner).assign
    layout = layout or SequenceLayout.contiguous(mask.grid.tokens, strategy.world)
    if (layout.tokens, layout.world) != (mask.grid.tokens, strategy.world):
        raise UserError(
            f"sequence layout of {layout.tokens} tokens on {layout.world} ranks does not fit {mask.grid.tokens} "
            f"tokens on {strategy.world}; build it from the same grid and strategy"
        )
    grid, work = mask.grid, mask.counts.rows
    q_home, k_home = majority_ring_ranks(layout, grid, mask.heads, strategy)
    position = block_positions(grid) if keys == NEEDED else None
    start = time.perf_counter()
    owner = assign(Problem(strategy, work, q_home, head_price(grid, strategy), position))
    chunks = Chunks.of_heads(owner, k_home, strategy)
    seconds = time.perf_counter() - start
    if keys == NEEDED:
        chunks = Chunks.of_rows(owner, k_home, strategy, mask)
    assignment = Assignment(strategy, grid, owner, chunks, wire)
    return Plan(
        assignment=assignment,
        metrics=PlanMetrics.of(assignment, mask, compare=compare),
        planner=planner,
        moved=_moved(assignment, layout),
        plan_ms=seconds * 1e3,
    )


def _moved(assignment: Assignment, layout: SequenceLayout) -> float:
    """Share of queries that change ring rank on their way to their owner."""
    strategy, grid, owner = assignment.strategy, assignment.grid, assignment.q_owner
    if strategy.ring == 1:
        return 0.0
    ring, stays = strategy.ring, 0
    for order, heads in grid.order_groups(len(owner)):
        held, _ = layout.block_segments(grid, order)
        place = held.block * ring + held.rank // strategy.ulysses
        tokens = np.bincount(place, held.length, grid.nq * ring)  # by block and ring rank
        stays += int(tokens[np.arange(grid.nq) * ring + owner[heads] // strategy.ulysses].sum())
    return 1 - stays / (len(owner) * grid.tokens)
