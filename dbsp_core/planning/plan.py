"""Plans: an assignment, the numbers it has for a mask, and how it was made."""

from __future__ import annotations

import functools
import time
from dataclasses import dataclass, replace

import numpy as np

from dbsp_core.layout.sequence_layout import SequenceLayout, ShardSegments
from dbsp_core.layout.strategy import Strategy
from dbsp_core.masks.block_mask import BlockMask, require_mask
from dbsp_core.masks.grid import BlockAxis, BlockGrid, Order
from dbsp_core.masks.token_order import CANONICAL
from dbsp_core.planning.assignment import Assignment, work_of_both
from dbsp_core.planning.baselines import balanced_majority_rank, contiguous_assignment, majority_rank
from dbsp_core.planning.bounds import whole_row_bound
from dbsp_core.planning.imbalance import imbalance_ratio
from dbsp_core.planning.key_chunks import require_keys
from dbsp_core.planning.key_travel import KeyTravel, RingKeys
from dbsp_core.planning.planner_input import PlannerInput
from dbsp_core.planning.planners import PlannerConfig, require_planner
from dbsp_core.planning.row_owners import RowOwners
from dbsp_core.planning.wire_format import require_wire_format
from dbsp_core.utils.compiling import not_compiled
from dbsp_core.utils.errors import UserError

__all__ = ["Plan", "PlanMetrics", "make_plan", "require_slots"]


@dataclass(frozen=True, eq=False, repr=False)
class PlanMetrics:
    """The numbers of an assignment for one mask.

    Attributes:
        work: int64[periods, P], dense blocks by (period, rank).
        baseline_work: int64[y, P] of the contiguous assignment; None where comparing was left out.
        rho_bound: ρ_s that no plan of this planner's granularity can beat; NaN where comparing was left out.
        lockstep: See `KeyTravel.lockstep`.
    """

    work: np.ndarray
    baseline_work: np.ndarray | None
    rho_bound: float
    lockstep: bool = True

    @classmethod
    def of(cls, assignment: Assignment, mask: BlockMask, config: PlannerConfig, *, compare: bool) -> PlanMetrics:
        """Counts the blocks of `mask`; to `compare`, also those of the contiguous plan, and the bound."""
        assignment.require_fit(mask)
        lockstep, strategy, counts = assignment.keys.lockstep, assignment.strategy, mask.counts
        if not compare:
            return cls(assignment.work(counts), None, float("nan"), lockstep)
        without = _baseline_assignment(mask.grid, mask.heads, strategy)
        baseline, work = work_of_both(without, assignment, counts)
        if lockstep:
            bound = require_planner(config.name).bound(counts.rows, counts.columns, strategy, config)
        else:  # of any rows, as only a rank's sum must be even
            bound = whole_row_bound(counts.rows, counts.columns, strategy.world, 1)
        return cls(work, baseline, bound, lockstep)

    @property
    def compared(self) -> tuple[np.ndarray, np.ndarray]:
        """`work` and `baseline_work`. Raises RuntimeError where comparing was left out."""
        if self.baseline_work is None:
            raise RuntimeError("this plan was made without comparing it to the contiguous one")
        return self.work, self.baseline_work

    @property
    def rho(self) -> float:
        """ρ_s of Eq. 1: what the slowest ranks compute, over the mean, wherever ranks wait for one another."""
        return imbalance_ratio(self.work if self.lockstep else self.work.sum(axis=0, keepdims=True))

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
        assignment: Which rank owns each row, and how keys travel to it.
        metrics: Its numbers for one mask.
        config: The planner and its settings.
        moved: Share of Q, K, V elements whose owner's ring rank is not that of the rank that holds them outside.
        plan_ms: Time from counts to owners and slots, milliseconds; counting blocks is not in it.
    """

    assignment: Assignment
    metrics: PlanMetrics
    config: PlannerConfig
    moved: float
    plan_ms: float

    def __repr__(self) -> str:
        keys = "" if self.assignment.keys.lockstep else f", {self.assignment.keys.name} keys"
        return f"<Plan {self.strategy} by {self.planner}{keys}: {self.metrics.summary}, moved {self.moved:.1%}>"

    @property
    def planner(self) -> str:
        """The planner's name."""
        return self.config.name

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

    def with_keys(self, keys: KeyTravel, mask: BlockMask) -> Plan:
        """The same rows with keys that travel otherwise, and the numbers of `mask`."""
        assignment = replace(self.assignment, keys=keys)
        work = assignment.work(mask.counts)
        return replace(self, assignment=assignment, metrics=replace(self.metrics, work=work))

    def evaluate(self, mask: BlockMask, *, compare: bool = True) -> Plan:
        """This assignment with the numbers of another mask of the same grid. No planning: `plan_ms` is 0."""
        metrics = PlanMetrics.of(self.assignment, mask, self.config, compare=compare)
        return replace(self, metrics=metrics, plan_ms=0.0)


def require_slots(strategy: Strategy, grid: BlockGrid) -> None:
    """Raises UserError when a ring has more ranks than there are KV blocks to put into its slots."""
    if strategy.ring > grid.nk:
        raise UserError(
            f"strategy {strategy} has {strategy.ring} ring ranks but the mask has only {grid.nk} KV blocks; use a "
            f"smaller ring, a smaller block size, or U{strategy.world}R1"
        )


@not_compiled
def make_plan(
    mask: BlockMask,
    strategy: Strategy | str,
    planner: PlannerConfig | str = "dbsp",
    *,
    layout: SequenceLayout | None = None,
    compare: bool = True,
    keys: str = "ring",
    precision: str = "model",
) -> Plan:
    """Plans one attention. Deterministic: equal arguments give equal plans on every rank.

    Args:
        mask: Its dense blocks, on any device.
        strategy: How many ranks share heads and how many form a ring, such as "U4R2" (paper §2.3).
        planner: A name from `dbsp_core.planning.planners.PLANNERS`, or that and what else it is told.
        layout: Which rank holds which tokens before and after. Default: contiguous shards of ceil(tokens / P).
        compare: Whether to count what the contiguous plan would do, and what no plan could beat, as reports show them.
        keys: "ring"; "all": each rank is sent all keys and values of its heads, in chunks, from where they live; or
            "needed": those that its rows need, and no others (as DSV does, Tan et al. 2025, §5.2). Planner "dbsp" then
            cuts rows into runs of tokens, and the plan serves masks only that need no further keys.
        precision: "model": queries, keys and values travel as they are; "int8": rounded, with a scale for each token
            and head, and without gradients. No plan assigns other rows for it.

    Returns:
        Owners of rows and slots of KV blocks, with their numbers for this mask.

    Raises:
        UserError: For an unknown planner, way of keys or precision, more ring ranks than KV blocks, or a layout of
            another size.
    """
    require_mask(mask)
    strategy = Strategy.parse(strategy)
    way, wire = require_keys(keys), require_wire_format(precision)
    config = planner if isinstance(planner, PlannerConfig) else PlannerConfig(planner)
    chosen = require_planner(config.name)
    require_slots(strategy, mask.grid)
    layout = layout or SequenceLayout.contiguous(mask.grid.tokens, strategy.world)
    if (layout.tokens, layout.world) != (mask.grid.tokens, strategy.world):
        raise UserError(
            f"sequence layout of {layout.tokens} tokens on {layout.world} ranks does not fit {mask.grid.tokens} "
            f"tokens on {strategy.world}; build it from the same grid and strategy"
        )
    grid, counts = mask.grid, mask.counts
    q_home, k_home = _home_ring_ranks(layout, grid, mask.heads, strategy)
    inputs = PlannerInput(
        strategy=strategy,
        row_work=counts.rows,
        kv_block_work=counts.columns,
        q_home=q_home,
        k_home=k_home,
        q_position=_block_positions(grid) if way.known_masks else None,
        count_work_by_slot=functools.partial(counts.work_by_slot, ring=strategy.ring),
    )
    start, counting = time.perf_counter(), counts.seconds
    q_owner, kv_slot = chosen.assign(inputs, config)
    travel = way.of(RowOwners(strategy, grid, q_owner), kv_slot, mask)
    seconds = time.perf_counter() - start - (counts.seconds - counting)
    assignment = Assignment(strategy, grid, q_owner, travel, wire)
    return Plan(
        assignment=assignment,
        metrics=PlanMetrics.of(assignment, mask, config, compare=compare),
        config=config,
        moved=_moved(assignment, layout),
        plan_ms=seconds * 1e3,
    )


def _moved(assignment: Assignment, layout: SequenceLayout) -> float:
    """Share of Q, K, V elements (K and V each counted like Q) that change ring rank on their way to their owner."""
    strategy, grid, q_owner, kv_slot = assignment.strategy, assignment.grid, assignment.q_owner, assignment.keys.slot
    if strategy.ring == 1:
        return 0.0
    ring, stays = strategy.ring, 0
    for order, heads in grid.order_groups(len(q_owner)):
        rows, keys = q_owner[heads] // strategy.ulysses, kv_slot[heads]
        for held, ring_rank, tensors in zip(layout.block_segments(grid, order), (rows, keys), (1, 2), strict=True):
            place = held.block * ring + held.rank // strategy.ulysses
            tokens = np.bincount(place, held.length, ring_rank.shape[1] * ring)  # by block and ring rank
            stays += tensors * int(tokens[np.arange(ring_rank.shape[1]) * ring + ring_rank].sum())
    return 1 - stays / (3 * len(q_owner) * grid.tokens)


@functools.lru_cache(maxsize=16)
def _baseline_assignment(grid: BlockGrid, heads: int, strategy: Strategy) -> Assignment:
    """The contiguous assignment on the contiguous layout, which is what runs without db-SP; equal for all masks."""
    layout = SequenceLayout.contiguous(grid.tokens, strategy.world)
    rings = _home_ring_ranks(layout, grid, heads, strategy)
    q_owner, slot = _read_only(contiguous_assignment(heads, *rings, strategy.ulysses))
    return Assignment(strategy, grid, q_owner, RingKeys(slot, strategy.ring))


@functools.lru_cache(maxsize=16)
def _home_ring_ranks(
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
        return _read_only(by_order(grid.common_order))
    q_ring, k_ring = (np.empty((heads, len(axis)), dtype=np.int64) for axis in (grid.q_axis, grid.k_axis))
    for order, in_order in grid.order_groups(heads):
        q_ring[in_order], k_ring[in_order] = by_order(order)
    return _read_only((q_ring, k_ring))


def _block_positions(grid: BlockGrid) -> np.ndarray:
    """Returns float64[nq], the mean canonical position of each query block's tokens.

    If heads have token orders of their own, positions follow these orders, which keep what is attended to together.
    """
    if grid.common_order is None:
        return np.arange(float(grid.nq))
    return np.add.reduceat(grid.token_permutation(grid.common_order), grid.q_axis.starts) / grid.q_axis.lengths


def _read_only(arrays: tuple[np.ndarray, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """The same arrays, protected: all plans made from them share them."""
    for array in arrays:
        array.flags.writeable = False
    return arrays
