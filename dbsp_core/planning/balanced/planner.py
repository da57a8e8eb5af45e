"""Planner "dbsp": the stages in order. Arrays in, owners and slots out. Only numpy."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from dbsp_core.planning.balanced.head_swaps import match_ulysses_ranks
from dbsp_core.planning.balanced.heads import balance_heads
from dbsp_core.planning.balanced.ring_slots import balance_slots
from dbsp_core.planning.balanced.row_moves import move_rows, trade_rows
from dbsp_core.planning.balanced.work import RingSchedule, head_shards
from dbsp_core.planning.baselines import contiguous_assignment
from dbsp_core.planning.imbalance import imbalance_ratio, owned_work

__all__ = ["plan_rows"]

HEAD_SHARE = 0.6  # of a hybrid's tolerance, what its Ulysses ranks may take
TURNS = 4  # most turns of whole heads and rows of split heads making way for each other


def plan_rows(
    row_work: np.ndarray,
    kv_block_work: np.ndarray,
    q_home: np.ndarray,
    k_home: np.ndarray,
    ulysses: int,
    ring: int,
    count_work_by_slot: Callable[[np.ndarray], np.ndarray],
    *,
    target_rho: float = 1.005,
    head_target_rho: float = 1.002,
    exchange_cost: float = 0.0,
    most_heads: int | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """The owner of every row and the slot of every (head, KV block): heads, then slots, then single rows.

    row_work:       int[H, nq], dense blocks per (head, query block);  kv_block_work: int[H, nk]
    q_home, k_home: int[nq], int[nk], ring rank where each block lives; int[H, nq], int[H, nk] where heads differ
    count_work_by_slot: slots int64[H, nk] -> int[H, nq, y], dense blocks of each row by slot; not called when y = 1,
                    once otherwise, and once more where the plan misses its tolerance
    target_rho:     ρ_s that is good enough for a ring or hybrid; `head_target_rho` for Ulysses alone
    exchange_cost:  what exchanging all of Q, K and V once costs, in units of ρ_s (time of the exchange over time of
                    perfectly balanced attention). 0: balance first, and move only what that needs
    most_heads:     of which a Ulysses rank may have rows, or None; see `heads.balance_heads`
    returns:        int64[H, nq], int64[H, nk]
    """
    heads = len(row_work)
    split_cost = exchange_cost * 2 / (3 * heads)  # one more Ulysses rank for a head: its K and V once more
    # 1. Heads to Ulysses ranks; without a ring that is all.
    if ring == 1:
        slots = np.zeros(kv_block_work.shape, dtype=np.int64)
        owner = balance_heads(row_work, ulysses, head_target_rho, split_cost, most_heads=most_heads)
        work_by_slot = row_work[:, :, None]
        rho = imbalance_ratio(owned_work(owner, work_by_slot, ulysses))
        return _unless_staying_is_better(
            owner, slots, rho, work_by_slot, q_home, k_home, ulysses, None, head_target_rho
        )
    # moved rows are much cheaper than split heads, but cannot level Ulysses ranks: leave them a part of the tolerance
    unsplit_target = 1 + HEAD_SHARE * (target_rho - 1)
    ulysses_rank = balance_heads(
        row_work, ulysses, unsplit_target, split_cost, _interleaved(q_home, ring), most_heads=most_heads
    )
    # 2. KV blocks to ring slots of equal work.
    slots = balance_slots(kv_block_work, k_home, _main_ulysses_rank(ulysses_rank, ulysses), ring)
    work_by_slot = count_work_by_slot(slots)
    schedule = RingSchedule(ulysses, ring)
    # 3. In turn, whole heads swapped and rows of split heads traded within a ring row, which moves no K or V.
    for turn in range(TURNS):
        parts = head_shards(work_by_slot, ulysses_rank, q_home, schedule)
        matched = match_ulysses_ranks(parts, ulysses, most_heads)
        changed = matched != parts.ulysses_rank  # whole heads only
        ulysses_rank[parts.head[changed]] = matched[changed][:, None]
        work = parts.work_by_rank(matched, ulysses)
        if parts.is_unsplit.all() or imbalance_ratio(work) <= target_rho or (turn > 0 and not changed.any()):
            break
        ulysses_rank, work = trade_rows(work_by_slot, ulysses_rank, q_home, work, schedule, (1 + target_rho) / 2)
        if imbalance_ratio(work) <= target_rho:
            break
    # 4. Single rows moved to other ring ranks, as few as bring ρ_s to the tolerance.
    owner, work = move_rows(work_by_slot, ulysses_rank, q_home, work, schedule, target_rho, exchange_cost)
    rho = imbalance_ratio(work)
    return _unless_staying_is_better(
        owner, slots, rho, work_by_slot, q_home, k_home, ulysses, count_work_by_slot, target_rho
    )


def _unless_staying_is_better(
    owner: np.ndarray,
    slots: np.ndarray,
    rho: float,
    work_by_slot: np.ndarray,
    q_home: np.ndarray,
    k_home: np.ndarray,
    ulysses: int,
    count_work_by_slot: Callable[[np.ndarray], np.ndarray] | None,
    target_rho: float,
) -> tuple[np.ndarray, np.ndarray]:
    """The plan, or heads in equal runs and blocks at home where a handful of rows is better left alone.

    rho: ρ_s of the plan
    """
    if rho > target_rho:
        stay, at_home = contiguous_assignment(len(owner), q_home, k_home, ulysses)
        at_rest = count_work_by_slot(at_home) if count_work_by_slot else work_by_slot
        if imbalance_ratio(owned_work(stay, at_rest, ulysses)) < rho:
            return stay, at_home
    return owner, slots


def _interleaved(q_home: np.ndarray, ring: int) -> np.ndarray:
    """int64[nq]: query blocks in an order that visits the ring ranks in turn: a run takes equally from each.

    Where heads differ, in an order that does so for the first of them: it only decides how even the start is.
    """
    q_home = q_home if q_home.ndim == 1 else q_home[0]
    turn = np.empty(len(q_home), dtype=np.int64)
    for rank in range(ring):
        mine = q_home == rank
        turn[mine] = np.arange(mine.sum())
    return np.argsort(turn, kind="stable")


def _main_ulysses_rank(ulysses_rank: np.ndarray, ulysses: int) -> np.ndarray:
    """int64[H]: the Ulysses rank with most rows of each head; ties go to the lower index. ulysses_rank: int[H, nq]"""
    return np.stack([(ulysses_rank == u).sum(axis=1) for u in range(ulysses)]).argmax(axis=0)
