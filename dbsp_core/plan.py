"""Plans: who computes which row, and in which slot each KV block travels, with the numbers that justify it."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from dbsp_core.grid import BlockGrid
from dbsp_core.home import Fragments, HomeLayout
from dbsp_core.imbalance import cell_counts, imbalance_ratio, period_counts
from dbsp_core.mask import BlockMask
from dbsp_core.partition.baselines import contiguous_heads, resident_parts
from dbsp_core.partition.blocks import biased_greedy
from dbsp_core.partition.bounds import whole_block_bound
from dbsp_core.partition.heads import greedy_heads
from dbsp_core.strategy import Strategy

__all__ = ["PLANNERS", "Counts", "Plan", "make_plan", "require_planner", "require_slots"]


@dataclass(frozen=True, eq=False)
class Counts:
    """What a planner may look at: sums of the mask, and where blocks live before the exchange.

    rows:    int64[H, nq], dense blocks per (head, query block)
    columns: int64[H, nk], dense blocks per (head, KV block)
    q_home:  int64[nq], k_home: int64[nk]: ring rank that holds most of each block at home
    """

    rows: np.ndarray
    columns: np.ndarray
    q_home: np.ndarray
    k_home: np.ndarray

    @property
    def heads(self) -> int:
        return len(self.rows)


@dataclass(frozen=True, eq=False)
class Plan:
    """An immutable assignment of work.

    q_owner: int64[H, nq], the rank that computes each (head, query block) row
    kv_slot: int64[H, nk], the ring slot in which each (head, KV block) travels
    work:    int64[y, P], dense blocks by (period, rank): b(i, g) of Eq. 1
    rho, rho_before: ρ_s of this plan, and of the contiguous plan on the contiguous home layout
    rho_bound:       ρ_s that no plan of this granularity can beat
    moved:           share of Q, K, V elements whose owner's ring rank is not their home's
    plan_ms:         time from counts to owners and slots, milliseconds
    """

    strategy: Strategy
    planner: str
    grid: BlockGrid
    q_owner: np.ndarray
    kv_slot: np.ndarray
    work: np.ndarray
    work_before: np.ndarray
    rho_bound: float
    moved: float
    plan_ms: float

    @property
    def heads(self) -> int:
        return len(self.q_owner)

    @property
    def rho(self) -> float:
        return imbalance_ratio(self.work)

    @property
    def rho_before(self) -> float:
        return imbalance_ratio(self.work_before)

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

    @cached_property
    def fingerprint(self) -> int:
        """63 bits that differ between plans: equal on all ranks or the job would hang or be wrong."""
        digest = hashlib.blake2b(str((self.strategy, self.grid)).encode(), digest_size=8)
        digest.update(self.q_owner.tobytes())
        digest.update(self.kv_slot.tobytes())
        return int.from_bytes(digest.digest(), "big") >> 1

    def rows_of(self, rank: int) -> tuple[np.ndarray, np.ndarray]:
        """(head, query block) of the rows that `rank` computes, int64[Rq] each, in packing order."""
        head, block = np.nonzero(self.q_owner == rank)
        return head, block

    def slot_blocks(self, slot: int, column: int) -> tuple[np.ndarray, np.ndarray]:
        """(head, KV block) of what travels in `slot` along Ulysses column `column`, int64[Ck] each, as packed."""
        head, block = np.nonzero((self.kv_slot == slot) & self.head_columns[:, column, None])
        return head, block

    def reused_for(self, mask: BlockMask) -> Plan:
        """This assignment with the numbers of another mask of the same grid. No planning: `plan_ms` is 0."""
        bits, rows, columns = mask.bits.cpu().numpy(), mask.row_counts(), mask.column_counts()
        return replace(
            self,
            work=_work(bits, self.q_owner, self.kv_slot, self.strategy),
            work_before=_work(bits, *_baseline(self.grid, self.heads, self.strategy), self.strategy),
            rho_bound=whole_block_bound(rows, columns, self.strategy.ulysses, self.strategy.ring),
            plan_ms=0.0,
        )


Assignment = tuple[np.ndarray, np.ndarray]
"""(int64[H, nq] owner of each row, int64[H, nk] slot of each KV block)"""


def _assign(column: np.ndarray, q_ring: np.ndarray, slot: np.ndarray, strategy: Strategy) -> Assignment:
    """Whole heads to Ulysses columns and whole blocks to ring ranks and slots: owner = ring rank · x + column."""
    owner = q_ring[None, :] * strategy.ulysses + column[:, None]
    return owner, np.tile(slot, (len(column), 1))


def plan_contiguous(counts: Counts, strategy: Strategy, reward: float, head_cap: bool) -> Assignment:
    """Ulysses, Ring and USP as they are: heads in equal runs, blocks where they live."""
    return _assign(contiguous_heads(counts.heads, strategy.ulysses), counts.q_home, counts.k_home, strategy)


def plan_paper(counts: Counts, strategy: Strategy, reward: float, head_cap: bool) -> Assignment:
    """Alg. 1: greedy heads, then biased greedy blocks for Q and for K, V on counts summed over heads."""
    cap = -(-counts.heads // strategy.ulysses) if head_cap else None
    column = greedy_heads(counts.rows.sum(axis=1), strategy.ulysses, cap)
    q_ring = biased_greedy(counts.rows.sum(axis=0), strategy.ring, counts.q_home, reward)
    slot = biased_greedy(counts.columns.sum(axis=0), strategy.ring, counts.k_home, reward)
    return _assign(column, q_ring, slot, strategy)


PLANNERS: dict[str, Callable[[Counts, Strategy, float, bool], Assignment]] = {
    "contiguous": plan_contiguous,
    "paper": plan_paper,
}


def require_planner(name: str) -> None:
    """Raises ValueError unless `name` is a planner."""
    if name not in PLANNERS:
        raise ValueError(f"unknown planner {name!r}; use one of {', '.join(PLANNERS)}")


def require_slots(strategy: Strategy, grid: BlockGrid) -> None:
    """Raises ValueError when a ring has more ranks than there are KV blocks to put into its slots."""
    if strategy.ring > grid.nk:
        raise ValueError(
            f"strategy {strategy} has {strategy.ring} ring ranks but the mask has only {grid.nk} KV blocks; use a "
            f"smaller ring, a smaller block size, or U{strategy.world}R1"
        )


def make_plan(
    mask: BlockMask,
    strategy: Strategy | str,
    planner: str = "paper",
    *,
    home: HomeLayout | None = None,
    reward: float = 1.0,
    head_cap: bool = False,
) -> Plan:
    """Plans one attention.

    home:     where tokens live before and after (default: contiguous)
    reward:   R_b ≥ 0 of planner "paper": how strongly blocks are held where they are (§4.2.2)
    head_cap: whether planner "paper" gives no Ulysses column more than ceil(H / x) heads
    Deterministic: equal arguments give equal plans on every rank. Raises ValueError for an unknown planner, more ring
    ranks than KV blocks, or a home layout of another size.
    """
    strategy = Strategy.parse(strategy)
    grid = mask.grid
    require_planner(planner)
    require_slots(strategy, grid)
    if not reward >= 0:
        raise ValueError(f"reward R_b={reward} must not be negative; 0 balances without regard to where blocks are")
    home = home or HomeLayout.contiguous(grid.tokens, strategy.world)
    if (home.tokens, home.world) != (grid.tokens, strategy.world):
        raise ValueError(
            f"home layout of {home.tokens} tokens on {home.world} ranks does not fit {grid.tokens} tokens on "
            f"{strategy.world}; build it from the same grid and strategy"
        )
    bits = mask.bits.cpu().numpy()
    rows, columns = mask.row_counts(), mask.column_counts()

    q_fragments, k_fragments = home.fragments(grid.q_axis), home.fragments(grid.k_axis)
    q_home = resident_parts(q_fragments.tokens_by_ring(grid.nq, strategy))
    k_home = resident_parts(k_fragments.tokens_by_ring(grid.nk, strategy))
    counts = Counts(rows, columns, q_home, k_home)
    start = time.perf_counter()
    q_owner, kv_slot = PLANNERS[planner](counts, strategy, reward, head_cap)
    plan_ms = (time.perf_counter() - start) * 1e3
    return Plan(
        strategy=strategy,
        planner=planner,
        grid=grid,
        q_owner=q_owner,
        kv_slot=kv_slot,
        work=_work(bits, q_owner, kv_slot, strategy),
        work_before=_work(bits, *_baseline(grid, mask.heads, strategy), strategy),
        rho_bound=whole_block_bound(rows, columns, strategy.ulysses, strategy.ring),
        moved=_moved(q_owner, kv_slot, strategy, q_fragments, k_fragments),
        plan_ms=plan_ms,
    )


def _baseline(grid: BlockGrid, heads: int, strategy: Strategy) -> Assignment:
    """The contiguous plan on the contiguous home layout: what runs without db-SP, whatever the mask."""
    home = HomeLayout.contiguous(grid.tokens, strategy.world)
    q_home = resident_parts(home.fragments(grid.q_axis).tokens_by_ring(grid.nq, strategy))
    k_home = resident_parts(home.fragments(grid.k_axis).tokens_by_ring(grid.nk, strategy))
    return _assign(contiguous_heads(heads, strategy.ulysses), q_home, k_home, strategy)


def _work(bits: np.ndarray, q_owner: np.ndarray, kv_slot: np.ndarray, strategy: Strategy) -> np.ndarray:
    return period_counts(cell_counts(bits, q_owner, kv_slot, strategy.world, strategy.ring), strategy.ulysses)


def _moved(q_owner: np.ndarray, kv_slot: np.ndarray, strategy: Strategy, q: Fragments, k: Fragments) -> float:
    """Share of Q, K, V elements (K and V each counted like Q) that change ring rank on their way to their owner."""
    x = strategy.ulysses
    q_moved = ((q_owner[:, q.block] // x != q.rank // x) * q.length).sum()
    kv_moved = ((kv_slot[:, k.block] != k.rank // x) * k.length).sum()
    return int(q_moved + 2 * kv_moved) / (3 * len(q_owner) * int(q.length.sum()))
