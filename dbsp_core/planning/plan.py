"""Plans: the owner of each row and the keys that each rank is sent, with the work of each rank under one mask."""

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
from dbsp_core.planning.chunks import ALL, NEEDED, Chunks, columns_of_heads, require_keys
from dbsp_core.planning.comm_dtype import MODEL, CommDtype, PrecisionLike, read_comm_dtype
from dbsp_core.planning.planner_config import PlannerLike, read_planner
from dbsp_core.planning.planners import (
    Problem,
    balanced_majority_rank,
    contiguous_heads,
    head_price,
    majority_rank,
)
from dbsp_core.utils.errors import UserError
from dbsp_core.utils.process import not_compiled


@lru_cache(maxsize=16)
def plain_owners(grid: BlockGrid, heads: int, strategy: Strategy) -> np.ndarray:
    """Returns int64[H, nq]: rows' ranks without db-SP: heads in equal runs, blocks in contiguous shards."""
    layout = SequenceLayout.contiguous(grid.tokens, strategy.world)
    q_ring_rank, _ = majority_ring_ranks(layout, grid, heads, strategy)
    return _read_only(q_ring_rank * strategy.ulysses + contiguous_heads(heads, strategy.ulysses)[:, None])


@lru_cache(maxsize=16)
def majority_ring_ranks(
    layout: SequenceLayout, grid: BlockGrid, heads: int, strategy: Strategy
) -> tuple[np.ndarray, np.ndarray]:
    """Returns int64[nq], int64[nk]: the ring rank that holds most of each query and KV block.

    [H, nq], [H, nk] where heads have token orders of their own.
    """

    q_ring_rank, k_ring_rank = (np.empty((heads, blocks), dtype=np.int64) for blocks in (grid.nq, grid.nk))
    for order, in_order in grid.order_groups(heads):
        majority = majority_rank if order == CANONICAL else balanced_majority_rank
        for ring_rank, segments in zip((q_ring_rank, k_ring_rank), layout.block_segments(grid, order), strict=True):
            ring_rank[in_order] = majority(segments.tokens_by_ring(ring_rank.shape[1], strategy))
    if grid.common_order is not None:
        q_ring_rank, k_ring_rank = q_ring_rank[0], k_ring_rank[0]
    return _read_only(q_ring_rank), _read_only(k_ring_rank)


def block_positions(grid: BlockGrid) -> np.ndarray:
    """Returns float64[nq], the mean canonical position of each query block's tokens.

    If heads have token orders of their own, positions follow these orders, which keep what is attended to together.
    """
    if grid.common_order is None:
        return np.arange(float(grid.nq))
    return np.add.reduceat(grid.token_permutation(grid.common_order), grid.q_axis.starts) / grid.q_axis.lengths


def _read_only(array: np.ndarray) -> np.ndarray:
    """Returns the array, protected: all plans made from it share it."""
    array.flags.writeable = False
    return array


@dataclass(frozen=True, eq=False, repr=False)
class Plan:
    """One attention on a group's ranks, and how much each rank computes under one mask.

    Ranks wait for one another at the end of an attention only, so all numbers are totals.

    Attributes:
        owner: int64[H, nq], the rank that computes each row, a (head, query block).
        chunks: The KV blocks that each rank is sent in each chunk.
        planner: The planner's name.
        work, longest: int64[P], active blocks of each rank, and of its longest row.
        comm_dtype: Communication dtype of queries, keys, values and the output.
        baseline_work: int64[P], the active blocks of each rank without db-SP, or None if not compared.
        rho_bound: ρ_s that no plan of whole rows can beat; NaN if not compared.
        moved: Share of queries whose owner is in another ring rank than the rank that holds them outside attention.
        plan_ms: Milliseconds from counts to owners and chunks; counting blocks is not included.
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
        """Returns the longest row over a slot's share of its rank's work, the worst rank's.

        Args:
            slots: Rows that a rank's device computes at a time. They take at least max(1, row share) times as long
                as a slot's share, and whole rows less than 1 + row share.
        """
        return slots * self._longest_share

    @cached_property
    def _longest_share(self) -> float:
        """The longest row over all of its rank's work, the worst rank's."""
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
        """Share of blocks that are dense."""
        return float(sum(self.work.tolist()) / (self.heads * self.grid.pairs))

    @property
    def split_heads(self) -> int:
        """Heads whose rows are in more than one Ulysses rank."""
        return int((self._columns > 1).sum())

    @property
    def extra_kv(self) -> float:
        """K and V elements sent more than once, as a share of all Q, K, V.

        If all keys are sent: to more than one rank of a ring row. If only needed ones are: to more than one rank at
            all.
        """
        if self.chunks.keys == NEEDED:
            copies = (self.chunks.sent.sum(axis=0) - 1).clip(min=0).sum(axis=0)
            return int(copies @ self.grid.k_axis.lengths) * 2 / (3 * self.heads * self.grid.tokens)
        return int((self._columns - 1).clip(min=0).sum()) * 2 / (3 * self.heads)

    @cached_property
    def _columns(self) -> np.ndarray:
        """int64[H]: number of Ulysses ranks in which each head has rows."""
        columns: np.ndarray = columns_of_heads(self.owner, self.strategy.ulysses).sum(axis=1)
        return columns

    def rows_of(self, rank: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns (head, query block) of the rows that `rank` computes, int64[Rq] each, in packing order."""
        head, block = np.divmod(np.flatnonzero(self.owner == rank), self.owner.shape[1])  # faster than np.nonzero
        return head, block

    @cached_property
    def fingerprint(self) -> int:
        """63 bits that differ between plans with different routes; all ranks must have the same."""
        names = self.strategy, self.grid, self.chunks.keys, self.comm_dtype
        digest = hashlib.blake2b(str(names).encode(), digest_size=8)
        digest.update(self.owner.astype(np.uint16).tobytes())  # there are no more ranks, and bytes are a quarter
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
            raise UserError(f"the plan has {self.heads} heads, the mask {mask.heads}; make a plan for this mask")
        if self.grid != mask.grid:
            raise UserError(f"the plan is on {self.grid}, the mask on {mask.grid}; make a plan for this mask")

    def fits(self, mask: BlockMask) -> bool:
        """Returns True if a mask has as many heads, is on the same grid, and needs no keys that are not sent."""
        if (self.heads, self.grid) != (mask.heads, mask.grid):
            return False
        return self.chunks.keys == ALL or self.chunks.covers(self.owner, mask)

    def counted(self, counts: BlockMask | np.ndarray, *, compare: bool = True) -> Plan:
        """Returns the same plan with the numbers of other counts. Nothing is planned: `plan_ms` is 0.

        Args:
            counts: A mask of the same grid and heads, or int64[H, nq], active blocks of each row.
            compare: True to count what the contiguous plan would do, and what no plan could beat.

        Raises:
            UserError: For counts of another shape.
        """
        if isinstance(counts, BlockMask):
            self.require_fit(counts)
            counts = counts.counts.rows
        elif counts.shape != self.owner.shape:
            raise UserError(
                f"row counts of shape {counts.shape} do not fit a plan of {self.heads} heads of {self.grid.nq} query "
                "blocks; make a plan for these counts"
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
    """Returns the sequence layout that a planner is meant for."""
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
    """Plans one attention. Deterministic: equal arguments give equal plans on every rank.

    Args:
        mask: The mask, on any device.
        strategy: Number of ranks that share heads and number that form a ring, such as "U4R2" (paper §2.3).
        planner: A name from `dbsp_core.planning.planners.PLANNERS`, or {"name": "paper", "reward": 2}.
        layout: Layout of the tokens before and after. Default: contiguous shards of ceil(tokens / P).
        compare: True to count what the contiguous plan would do, and what no plan could beat, as reports show them.
        keys: "all": each rank is sent all keys and values of its heads, in chunks, from where they live; or "needed":
            those that its rows need, and no others (as DSV does, Tan et al. 2025, §5.2). Planner "dbsp" then cuts rows
            into runs of tokens, and the plan covers only masks that need no other keys.
        precision: "model": queries, keys and values are sent as they are; "int8": rounded, with a scale for each token
            and head, and without gradients; {"qkv": "int8", "out": "int8"}: the output, too. No plan assigns other
            rows for it.
        whole_heads: True if no head may be split over Ulysses ranks, for kernels that support only whole heads.

    Returns:
        Owners of rows and chunks of keys, with their numbers for this mask.

    Raises:
        UserError: For an unknown planner, way of keys or precision, or a layout of another size.
    """
    require_mask(mask)
    require_keys(keys)
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
    """Plans one attention from its rows' active blocks; all keys of a rank's heads are sent. See `make_plan`.

    Args:
        row_work: int64[H, nq], active blocks of each row.
        runs: True if planner "dbsp" cuts rows into runs of tokens, for plans with selective KV exchange.
    """
    strategy, comm_dtype = Strategy.parse(strategy), read_comm_dtype(precision)
    planner = read_planner(planner)
    layout = layout or SequenceLayout.contiguous(grid.tokens, strategy.world)
    if (layout.tokens, layout.world) != (grid.tokens, strategy.world):
        raise UserError(
            f"sequence layout of {layout.tokens} tokens on {layout.world} ranks does not fit {grid.tokens} "
            f"tokens on {strategy.world}; build it from the same grid and strategy"
        )
    q_ring_rank, k_ring_rank = majority_ring_ranks(layout, grid, len(row_work), strategy)
    position, price = (block_positions(grid), 0) if runs else (None, head_price(grid, strategy))
    problem = Problem(strategy, row_work, q_ring_rank, price, position, whole_heads)
    start = time.perf_counter()
    owner = planner.assign(problem)
    chunks = Chunks.of_heads(owner, k_ring_rank, strategy)
    plan_ms = (time.perf_counter() - start) * 1e3
    plan = Plan(strategy, grid, owner, chunks, planner.name, np.zeros(strategy.world, dtype=np.int64), comm_dtype)
    return replace(plan.counted(row_work, compare=compare), moved=_moved(plan, layout), plan_ms=plan_ms)


def _moved(plan: Plan, layout: SequenceLayout) -> float:
    """Returns the share of queries whose owner is in another ring rank than the rank that holds them."""
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
