"""Plans: who computes which row, and in which slot each KV block travels, with the numbers that justify it."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import numpy as np

from dbsp_core.layout.sequence_layout import SequenceLayout, ShardSegments
from dbsp_core.layout.strategy import Strategy
from dbsp_core.masks.block_mask import BlockMask
from dbsp_core.masks.grid import BlockAxis, BlockGrid
from dbsp_core.masks.token_order import CANONICAL
from dbsp_core.planning.baselines import balanced_majority_rank, contiguous_assignment, majority_rank
from dbsp_core.planning.imbalance import imbalance_ratio
from dbsp_core.planning.planners import PlannerInput, PlannerSettings, require_planner
from dbsp_core.utils.errors import UserError

__all__ = ["Plan", "can_subdivide", "make_plan", "require_slots"]


@dataclass(frozen=True, eq=False)
class Plan:
    """An immutable assignment of work.

    q_owner: int64[H, nq], the rank that computes each (head, query block) row
    kv_slot: int64[H, nk], the ring slot in which each (head, KV block) travels
    work:    int64[y, P], dense blocks by (period, rank): b(i, g) of Eq. 1
    work_before:     int64[y, P], the same of the contiguous plan on the contiguous home layout; None where that was
                     left out (`make_plan(compare=False)`)
    rho, rho_before: ρ_s of this plan, and of the contiguous one; nan where that was left out
    rho_bound:       ρ_s that no plan of this granularity can beat; nan where comparing was left out
    moved:           share of Q, K, V elements whose owner's ring rank is not their home's
    head_cap:        see `dbsp_core.planning.planners.PlannerSettings`
    plan_ms:         time from counts to owners and slots, milliseconds; counting blocks is not in it
    grid:            the mask's, or for planner "burst" one whose blocks are parts of the mask's
    """

    strategy: Strategy
    planner: str
    grid: BlockGrid
    q_owner: np.ndarray
    kv_slot: np.ndarray
    work: np.ndarray
    work_before: np.ndarray | None
    rho_bound: float
    moved: float
    plan_ms: float
    head_cap: bool = False

    @property
    def heads(self) -> int:
        return len(self.q_owner)

    @property
    def rho(self) -> float:
        return imbalance_ratio(self.work)

    @property
    def rho_before(self) -> float:
        return float("nan") if self.work_before is None else imbalance_ratio(self.work_before)

    @property
    def contiguous_work(self) -> np.ndarray:
        """`work_before`. Raises RuntimeError where comparing was left out."""
        if self.work_before is None:
            raise RuntimeError("this plan was made without comparing it to the contiguous one")
        return self.work_before

    @property
    def density(self) -> float:
        """Share of blocks that are dense."""
        return int(self.work.sum()) / (self.heads * self.grid.nq * self.grid.nk)

    @cached_property
    def head_columns(self) -> np.ndarray:
        """bool[H, x]: the Ulysses columns in which each head has rows, hence needs its keys and values."""
        columns = np.zeros((self.heads, self.strategy.ulysses), dtype=bool)
        columns[np.arange(self.heads)[:, None], self.q_owner % self.strategy.ulysses] = True
        return columns

    @property
    def split_heads(self) -> int:
        """Heads whose rows are in more than one Ulysses column."""
        return int((self.head_columns.sum(axis=1) > 1).sum())

    @property
    def extra_kv(self) -> float:
        """K and V elements sent more than once, to further columns of split heads, as a share of all Q, K, V."""
        return int((self.head_columns.sum(axis=1) - 1).clip(min=0).sum()) * 2 / (3 * self.heads)

    @cached_property
    def fingerprint(self) -> int:
        """63 bits that differ between plans: equal on all ranks or the job would hang or be wrong."""
        digest = hashlib.blake2b(str((self.strategy, self.grid)).encode(), digest_size=8)
        digest.update(self.q_owner.astype(np.uint16).tobytes())  # no more ranks than that, and a quarter of the bytes
        digest.update(self.kv_slot.astype(np.uint16).tobytes())
        return int.from_bytes(digest.digest(), "big") >> 1

    def same_route(self, other: Plan) -> bool:
        """Whether both send the same pieces to the same ranks."""
        assignments = (self.q_owner, self.kv_slot), (other.q_owner, other.kv_slot)
        return (self.strategy, self.grid) == (other.strategy, other.grid) and all(
            mine is theirs or np.array_equal(mine, theirs) for mine, theirs in zip(*assignments, strict=True)
        )

    def rows_of(self, rank: int) -> tuple[np.ndarray, np.ndarray]:
        """(head, query block) of the rows that `rank` computes, int64[Rq] each, in packing order."""
        return _places_of(self.q_owner == rank)

    def slot_blocks(self, slot: int, column: int) -> tuple[np.ndarray, np.ndarray]:
        """(head, KV block) of what travels in `slot` along Ulysses column `column`, int64[Ck] each, as packed."""
        return _places_of((self.kv_slot == slot) & self.head_columns[:, column, None])

    def blocks_by_slot(self, column: int) -> list[tuple[np.ndarray, np.ndarray]]:
        """`slot_blocks` of all slots, in one pass."""
        wanted = np.flatnonzero(np.repeat(self.head_columns[:, column], self.kv_slot.shape[1]))
        slot = self.kv_slot.reshape(-1)[wanted].astype(np.uint16)  # sorted by radix
        sizes = np.bincount(slot, minlength=self.strategy.ring)
        in_order = wanted[np.argsort(slot, kind="stable")]
        pieces = np.split(in_order, np.cumsum(sizes)[:-1])
        return [(piece // self.kv_slot.shape[1], piece % self.kv_slot.shape[1]) for piece in pieces]

    def reused_for(self, mask: BlockMask, *, compare: bool = True) -> Plan:
        """This assignment with the numbers of another mask of the same grid. No planning: `plan_ms` is 0.

        compare: as for `make_plan`
        """
        if compare and mask.grid == self.grid:
            mask.counts.count([_stay(mask.grid, mask.heads, self.strategy)[1], self.kv_slot], self.strategy.ring)
        before = _baseline(mask, self.strategy) if compare else None
        mask = mask.subdivided(self.grid)
        counts = mask.counts
        bound = float("nan")
        if compare:
            bound = require_planner(self.planner).bound(counts.rows, counts.columns, self.strategy, self.head_cap)
        work = counts.work(self.q_owner, self.kv_slot, self.strategy)
        reused = replace(self, work=work, work_before=before, rho_bound=bound, plan_ms=0.0)
        # What follows from owners and slots alone is the same.
        for name in ("head_columns", "fingerprint"):
            if name in vars(self):
                vars(reused)[name] = vars(self)[name]
        return reused


def _places_of(chosen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """`np.nonzero` of bool[H, n], which takes several times as long in two dimensions as in one."""
    head, block = np.divmod(np.flatnonzero(chosen), chosen.shape[1])
    return head, block


def require_slots(strategy: Strategy, grid: BlockGrid) -> None:
    """Raises ValueError when a ring has more ranks than there are KV blocks to put into its slots."""
    if strategy.ring > grid.nk:
        raise UserError(
            f"strategy {strategy} has {strategy.ring} ring ranks but the mask has only {grid.nk} KV blocks; use a "
            f"smaller ring, a smaller block size, or U{strategy.world}R1"
        )


def make_plan(
    mask: BlockMask,
    strategy: Strategy | str,
    planner: str = "dbsp",
    *,
    home: SequenceLayout | None = None,
    reward: float = 1.0,
    head_cap: bool = False,
    tolerance: float | None = None,
    exchange_cost: float = 0.0,
    compare: bool = True,
) -> Plan:
    """Plans one attention.

    home: where tokens live before and after (default: contiguous)
    reward, head_cap, tolerance, exchange_cost: see `dbsp_core.planning.planners.PlannerSettings`
    compare: whether to count what the contiguous plan would do, and what no plan could beat, as reports show them
    Deterministic: equal arguments give equal plans on every rank. Raises UserError for an unknown planner, more ring
    ranks than KV blocks, or a home layout of another size.
    """
    strategy = Strategy.parse(strategy)
    chosen = require_planner(planner)
    settings = PlannerSettings(reward, head_cap, tolerance, exchange_cost)
    require_slots(strategy, mask.grid)
    home = home or SequenceLayout.contiguous(mask.grid.tokens, strategy.world)
    if (home.tokens, home.world) != (mask.grid.tokens, strategy.world):
        raise UserError(
            f"home layout of {home.tokens} tokens on {home.world} ranks does not fit {mask.grid.tokens} tokens on "
            f"{strategy.world}; build it from the same grid and strategy"
        )
    before = _baseline(mask, strategy) if compare else None
    if chosen.subdivides:
        mask = mask.subdivided(_cut(mask.grid, strategy.ring))
    grid, rows, columns = mask.grid, mask.counts.rows, mask.counts.columns
    q_home, k_home = _majority_rings(home, grid, mask.heads, strategy)
    count_work_by_slot = _Stopwatch(lambda slots: mask.counts.cells(slots, strategy.ring))
    given = PlannerInput(
        strategy=strategy,
        rows=rows,
        columns=columns,
        q_home=q_home,
        k_home=k_home,
        count_work_by_slot=count_work_by_slot,
        settings=settings,
    )
    start = time.perf_counter()
    q_owner, kv_slot = chosen.assign(given)
    seconds = time.perf_counter() - start - count_work_by_slot.seconds
    return Plan(
        strategy=strategy,
        planner=planner,
        grid=grid,
        q_owner=q_owner,
        kv_slot=kv_slot,
        work=mask.counts.work(q_owner, kv_slot, strategy),
        work_before=before,
        rho_bound=chosen.bound(rows, columns, strategy, settings.head_cap) if compare else float("nan"),
        moved=_moved(q_owner, kv_slot, strategy, grid, home),
        plan_ms=seconds * 1e3,
        head_cap=settings.head_cap,
    )


class _Stopwatch:
    """A function, and the seconds spent in it."""

    def __init__(self, function: Callable[[np.ndarray], np.ndarray]) -> None:
        self._function = function
        self.seconds = 0.0

    def __call__(self, slots: np.ndarray) -> np.ndarray:
        start = time.perf_counter()
        try:
            return self._function(slots)
        finally:
            self.seconds += time.perf_counter() - start


def _baseline(mask: BlockMask, strategy: Strategy) -> np.ndarray:
    """int64[y, P]: the work of the contiguous plan on the contiguous home layout, which is what runs without db-SP."""
    return mask.counts.work(*_stay(mask.grid, mask.heads, strategy), strategy)


@lru_cache(maxsize=16)
def _stay(grid: BlockGrid, heads: int, strategy: Strategy) -> tuple[np.ndarray, np.ndarray]:
    """Owners and slots of the contiguous plan on the contiguous home layout; equal for all masks of a grid."""
    home = SequenceLayout.contiguous(grid.tokens, strategy.world)
    return _read_only(contiguous_assignment(heads, *_majority_rings(home, grid, heads, strategy), strategy.ulysses))


@lru_cache(maxsize=16)
def _majority_rings(
    home: SequenceLayout, grid: BlockGrid, heads: int, strategy: Strategy
) -> tuple[np.ndarray, np.ndarray]:
    """int64[nq], int64[nk]: the ring rank that holds most of each query and KV block.

    [H, nq], [H, nk] where heads have token orders of their own.
    """

    def residents(fragments: ShardSegments, axis: BlockAxis, order: str) -> np.ndarray:
        tokens = fragments.tokens_by_ring(len(axis), strategy)
        return majority_rank(tokens) if order == CANONICAL else balanced_majority_rank(tokens)

    def by_order(order: str) -> tuple[np.ndarray, np.ndarray]:
        q, k = home.block_segments(grid, order)
        return residents(q, grid.q_axis, order), residents(k, grid.k_axis, order)

    if grid.common_order is not None:
        return _read_only(by_order(grid.common_order))
    q_ring, k_ring = (np.empty((heads, len(axis)), dtype=np.int64) for axis in (grid.q_axis, grid.k_axis))
    for order, in_order in grid.order_groups(heads):
        q_ring[in_order], k_ring[in_order] = by_order(order)
    return _read_only((q_ring, k_ring))


def _read_only(arrays: tuple[np.ndarray, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """The same arrays, protected: all plans made from them share them."""
    for array in arrays:
        array.flags.writeable = False
    return arrays


def can_subdivide(grid: BlockGrid, parts: int) -> bool:
    """Whether every full block can be cut into `parts` equal ones, as planner "burst" does."""
    return grid.block_q % parts == 0 and grid.block_k % parts == 0


def _cut(grid: BlockGrid, parts: int) -> BlockGrid:
    """The grid whose blocks are `parts` of the given one's. Raises ValueError when they cannot be cut evenly."""
    if not can_subdivide(grid, parts):
        raise UserError(
            f"planner 'burst' cuts every block over {parts} ring ranks, but blocks of {grid.block_q}×{grid.block_k} "
            "cannot be cut so evenly; use another block size or strategy"
        )
    return grid.resized(grid.block_q // parts, grid.block_k // parts)


def _moved(
    q_owner: np.ndarray, kv_slot: np.ndarray, strategy: Strategy, grid: BlockGrid, home: SequenceLayout
) -> float:
    """Share of Q, K, V elements (K and V each counted like Q) that change ring rank on their way to their owner."""
    if strategy.ring == 1:
        return 0.0
    x, moved = strategy.ulysses, 0
    for order, heads in grid.order_groups(len(q_owner)):
        q, k = home.block_segments(grid, order)
        moved += int(((q_owner[heads][:, q.block] // x != q.rank // x) * q.length).sum())
        moved += 2 * int(((kv_slot[heads][:, k.block] != k.rank // x) * k.length).sum())
    return moved / (3 * len(q_owner) * grid.tokens)
