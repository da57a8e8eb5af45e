"""Plans: the owner of each row, the keys sent to each rank, and each rank's work under one mask."""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache

import numpy as np

from dbsp_core.layout.sequence_layout import SequenceLayout
from dbsp_core.layout.strategy import Strategy
from dbsp_core.masks.block_mask import BlockMask, require_mask
from dbsp_core.masks.grid import CANONICAL, BlockGrid
from dbsp_core.planning.balance import imbalance_ratio, rho_bound, work_by_rank
from dbsp_core.planning.chunks import ALL, NEEDED, Chunks, columns_of_heads
from dbsp_core.planning.comm_dtype import MODEL, CommDtype, PrecisionLike, read_comm_dtype
from dbsp_core.planning.planner_config import PlannerLike, read_planner
from dbsp_core.planning.planners import (
    Problem,
    balanced_majority_rank,
    contiguous_heads,
    head_price,
    majority_rank,
)
from dbsp_core.utils.errors import UserError, did_you_mean
from dbsp_core.utils.process import not_compiled


@lru_cache(maxsize=16)
def plain_owners(grid: BlockGrid, heads: int, strategy: Strategy) -> np.ndarray:
    """Returns the owners without db-SP, int64[H, nq]: heads in equal runs, blocks in contiguous shards."""
    layout = SequenceLayout.contiguous(grid.tokens, strategy.world)
    q_ring_rank, _ = majority_ring_ranks(layout, grid, heads, strategy)
    return _read_only(q_ring_rank * strategy.ulysses + contiguous_heads(heads, strategy.ulysses)[:, None])


@lru_cache(maxsize=16)
def majority_ring_ranks(
    layout: SequenceLayout, grid: BlockGrid, heads: int, strategy: Strategy
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the ring rank that holds most of each query block and KV block, int64[nq] and int64[nk].

    With token orders per head: int64[H, nq] and int64[H, nk].
    """
    q_ring_rank, k_ring_rank = (np.empty((heads, blocks), dtype=np.int64) for blocks in (grid.nq, grid.nk))
    for order, in_order in grid.order_groups(heads):
        majority = majority_rank if order == CANONICAL else balanced_majority_rank
        for ring_rank, segments in zip((q_ring_rank, k_ring_rank), layout.block_segments(grid, order), strict=True):
            ring_rank[in_order] = majority(segments.tokens_by_ring(ring_rank.shape[1], strategy))
    if grid.common_order is not None:
        q_ring_rank, k_ring_rank = q_ring_rank[0], k_ring_rank[0]
    return _read_only(q_ring_rank), _read_only(k_ring_rank)


def _read_only(array: np.ndarray) -> np.ndarray:
    """Makes the array read-only, since plans share it."""
    array.flags.writeable = False
    return array


@dataclass(frozen=True, eq=False, repr=False)
class Plan:
    """Distribution of one attention over a group's ranks, and each rank's work under one mask.

    Ranks wait for each other only at the end of an attention, so all counts are totals.

    Attributes:
        owner: int64[H, nq], rank that computes each row (head, query block).
        chunks: The KV blocks sent to each rank in each chunk.
        planner: The planner's name.
        work, longest: int64[P], active blocks of each rank, and of its longest row.
        comm_dtype: Communication dtype of queries, keys, values and the output.
        baseline_work: int64[P], active blocks of each rank without db-SP, or None if not compared.
        rho_bound: Lower bound of ρ_s for plans of whole rows; NaN if not compared.
        moved: Fraction of queries whose owner is in another ring rank than the rank that holds them outside attention.
        plan_ms: Milliseconds from counts to owners and chunks, excluding counting blocks.
    """

    strategy: Strategy
    grid: BlockGrid
    owner: np.ndarray
    chunks: Chunks
    planner: str
    work: np.ndarray
    comm_dtype: CommDtype = MODEL
    longest: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    baseline_work: np.ndarray | None = None
    rho_bound: float = float("nan")
    moved: float = 0.0
    plan_ms: float = 0.0

    def __repr__(self) -> str:
        keys = "" if self.chunks.keys == ALL else ", selective KV exchange"
        rho = f"ρ_s {self.rho:.3f}"
        if self.baseline_work is not None:
            rho = f"ρ_s {self.rho_before:.3f} → {self.rho:.3f}, bound {self.rho_bound:.3f}"
        return f"<Plan {self.strategy} by {self.planner}{keys}: {rho}, moved {self.moved:.1%}>"

    @cached_property
    def heads(self) -> int:
        return len(self.owner)

    @cached_property
    def rho(self) -> float:
        """ρ_s: the work of the slowest rank over the mean."""
        return imbalance_ratio(self.work)

    def row_share(self, slots: int) -> float:
        """Returns the longest row relative to a slot's share of its rank's work, maximum over ranks.

        With `slots` rows at a time, the time is at least max(1, row share) times a slot's share, and below 1 + row
        share if rows are not cut.
        """
        return slots * self._longest_share

    @cached_property
    def _longest_share(self) -> float:
        """The longest row relative to its rank's work, maximum over ranks."""
        return float((self.longest / np.maximum(self.work, 1)).max())

    @property
    def rho_before(self) -> float:
        """ρ_s without db-SP; NaN if not compared."""
        return float("nan") if self.baseline_work is None else imbalance_ratio(self.baseline_work)

    @property
    def compared(self) -> tuple[np.ndarray, np.ndarray]:
        """`work` and `baseline_work`. Raises RuntimeError if not compared."""
        if self.baseline_work is None:
            raise RuntimeError("this plan was made without comparing it to the contiguous one")
        return self.work, self.baseline_work

    @cached_property
    def density(self) -> float:
        """Fraction of active blocks."""
        return float(sum(self.work.tolist()) / (self.heads * self.grid.pairs))

    @cached_property
    def split_heads(self) -> int:
        """Number of heads with rows on more than one Ulysses rank."""
        return int((columns_of_heads(self.owner, self.strategy.ulysses).sum(axis=1) > 1).sum())

    def rows_of(self, rank: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns heads and query blocks of the rows of `rank`, int64[Rq] each, in packing order."""
        head, block = np.divmod(np.flatnonzero(self.owner == rank), self.owner.shape[1])  # faster than np.nonzero
        return head, block

    @cached_property
    def fingerprint(self) -> int:
        """63-bit hash of everything that determines routes; must be equal on all ranks."""
        names = self.strategy, self.grid, self.chunks.keys, self.comm_dtype
        digest = hashlib.blake2b(str(names).encode(), digest_size=8)
        digest.update(self.owner.astype(np.uint16).tobytes())  # a quarter of the bytes, enough for any number of ranks
        for part in self.chunks.identity:
            digest.update(part.tobytes())
        return int.from_bytes(digest.digest(), "big") >> 1

    def same_routes(self, other: Plan) -> bool:
        """Returns True if both plans send the same tokens to the same ranks."""
        if self.owner is other.owner and self.chunks is other.chunks and self.comm_dtype is other.comm_dtype:
            return True
        return (
            (self.strategy, self.grid, self.comm_dtype) == (other.strategy, other.grid, other.comm_dtype)
            and np.array_equal(self.owner, other.owner)
            and self.chunks.equals(other.chunks)
        )

    def require_fit(self, mask: BlockMask) -> None:
        """Raises UserError for a mask of another number of heads or on another grid."""
        if self.heads != mask.heads:
            raise UserError(f"expected a mask of {self.heads} heads, got {mask.heads}; make a plan for this mask")
        if self.grid != mask.grid:
            raise UserError(f"expected a mask on {self.grid}, got {mask.grid}; make a plan for this mask")

    def fits(self, mask: BlockMask) -> bool:
        """Returns True if a mask has the same heads and grid and needs only keys that are sent."""
        if (self.heads, self.grid) != (mask.heads, mask.grid):
            return False
        return self.chunks.keys == ALL or self.chunks.covers(self.owner, mask)

    def counted(self, counts: BlockMask | np.ndarray, *, compare: bool = True) -> Plan:
        """Returns the same plan with the statistics of other counts; `plan_ms` is 0.

        Args:
            counts: A mask of the same grid and heads, or active blocks of each row int64[H, nq].
            compare: True to also compute `baseline_work` and `rho_bound`.

        Raises:
            UserError: The counts have another shape.
        """
        if isinstance(counts, BlockMask):
            self.require_fit(counts)
            counts = counts.counts.rows
        elif counts.shape != self.owner.shape:
            raise UserError(
                f"expected row counts of {self.heads} heads of {self.grid.nq} query blocks, got {counts.shape}; "
                "make a plan for these counts"
            )
        world, baseline, bound = self.strategy.world, None, float("nan")
        if compare:
            baseline = work_by_rank(plain_owners(self.grid, self.heads, self.strategy), counts, world)
            bound = rho_bound(counts, world)
        work, longest = work_by_rank(self.owner, counts, world), np.zeros(world, dtype=np.int64)
        np.maximum.at(longest, self.owner.ravel(), counts.ravel())
        return replace(self, work=work, longest=longest, baseline_work=baseline, rho_bound=bound, plan_ms=0.0)


@not_compiled
def usual_layout(planner: PlannerLike, grid: BlockGrid, strategy: Strategy) -> SequenceLayout:
    """Returns a planner's default sequence layout."""
    return SequenceLayout.named(read_planner(planner).layout, grid, strategy)


def make_plan(
    mask: BlockMask,
    strategy: Strategy | str,
    planner: PlannerLike = "dbsp",
    *,
    layout: SequenceLayout | None = None,
    compare: bool = True,
    keys: str = ALL,
    precision: PrecisionLike = MODEL,
    whole_heads: bool = False,
) -> Plan:
    """Plans one attention. Equal arguments give equal plans on all ranks.

    Args:
        mask: The mask, on any device.
        strategy: Ulysses and ring degrees, such as "U4R2" (paper §2.3).
        planner: A name from `dbsp_core.planning.planners.PLANNERS`, or {"name": "paper", "reward": 2}.
        layout: Layout of tokens outside attention. None: contiguous shards of ceil(tokens / P).
        compare: True to also compute `baseline_work` and `rho_bound`, for reports.
        keys: "all": send all keys and values of a rank's heads; "needed": only those that its rows need (as in DSV,
            Tan et al. 2025, §5.2). With "needed", planner "dbsp" cuts rows into runs of tokens, and the plan fits only
            masks that need no other keys.
        precision: "model": send q, k and v in the model's dtype; "int8": rounded, with a scale per token and head,
            without gradients; {"qkv": "int8", "out": "int8"}: also the output. Does not affect owners.
        whole_heads: True to not split heads over Ulysses ranks, for kernels that support only whole heads.

    Returns:
        The plan, with statistics for this mask.

    Raises:
        UserError: Unknown planner, keys or precision, or a layout of another size.
    """
    require_mask(mask)
    if keys not in (ALL, NEEDED):
        raise UserError(f"unknown keys {keys!r}; use one of {ALL}, {NEEDED}{did_you_mean(keys, (ALL, NEEDED))}")
    needed = keys == NEEDED
    plan = plan_from_counts(
        mask.counts.rows,
        mask.grid,
        strategy,
        planner,
        layout=layout,
        compare=compare,
        precision=precision,
        runs=needed,
        whole_heads=whole_heads,
    )
    if not needed:
        return plan
    return replace(plan, chunks=Chunks.of_rows(plan.owner, plan.chunks.k_ring_rank, plan.strategy, mask))


@not_compiled
def plan_from_counts(
    row_work: np.ndarray,
    grid: BlockGrid,
    strategy: Strategy | str,
    planner: PlannerLike = "dbsp",
    *,
    layout: SequenceLayout | None = None,
    compare: bool = True,
    precision: PrecisionLike = MODEL,
    runs: bool = False,
    whole_heads: bool = False,
) -> Plan:
    """Plans one attention from active blocks per row, sending all keys of a rank's heads. See `make_plan`.

    Args:
        row_work: int64[H, nq], active blocks of each row.
        runs: True to let planner "dbsp" cut rows into runs of tokens, for selective KV exchange.
    """
    strategy, comm_dtype = Strategy.parse(strategy), read_comm_dtype(precision)
    planner = read_planner(planner)
    layout = layout or SequenceLayout.contiguous(grid.tokens, strategy.world)
    if (layout.tokens, layout.world) != (grid.tokens, strategy.world):
        raise UserError(
            f"expected a sequence layout of {grid.tokens} tokens on {strategy.world} ranks, got {layout.tokens} "
            f"on {layout.world}; build it from the same grid and strategy"
        )
    q_ring_rank, k_ring_rank = majority_ring_ranks(layout, grid, len(row_work), strategy)
    position, price = None, head_price(grid, strategy)
    if runs:  # mean canonical positions; orders per head already keep tokens together that attend to each other
        position, price = np.arange(float(grid.nq)), 0
        if grid.common_order is not None:
            canonical = grid.token_permutation(grid.common_order)
            position = np.add.reduceat(canonical, grid.q_axis.starts) / grid.q_axis.lengths
    problem = Problem(strategy, row_work, q_ring_rank, price, position, whole_heads)
    start = time.perf_counter()
    owner = planner.assign(problem)
    chunks = Chunks.of_heads(owner, k_ring_rank, strategy)
    plan_ms = (time.perf_counter() - start) * 1e3
    plan = Plan(strategy, grid, owner, chunks, planner.name, np.zeros(strategy.world, dtype=np.int64), comm_dtype)
    return replace(plan.counted(row_work, compare=compare), moved=_moved(plan, layout), plan_ms=plan_ms)


def _moved(plan: Plan, layout: SequenceLayout) -> float:
    """Returns the fraction of queries whose owner is in another ring rank than their source rank."""
    strategy, grid, owner = plan.strategy, plan.grid, plan.owner
    if strategy.ring == 1:
        return 0.0
    ring, stays = strategy.ring, 0
    for order, heads in grid.order_groups(len(owner)):
        held, _ = layout.block_segments(grid, order)
        cell = held.block * ring + held.rank // strategy.ulysses
        tokens = np.bincount(cell, held.length, grid.nq * ring)  # by block and ring rank
        stays += int(tokens[np.arange(grid.nq) * ring + owner[heads] // strategy.ulysses].sum())
    return 1 - stays / (len(owner) * grid.tokens)
