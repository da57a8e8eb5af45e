"""Planner "dbsp": its stages in order. Only numpy."""

from __future__ import annotations

import numpy as np

from dbsp_core.planning.balanced.head_swaps import match_ulysses_ranks
from dbsp_core.planning.balanced.ring_slots import balance_slots
from dbsp_core.planning.balanced.row_moves import move_rows, trade_rows
from dbsp_core.planning.balanced.work import RingSchedule, head_shards
from dbsp_core.planning.baselines import contiguous_assignment
from dbsp_core.planning.heads import balance_heads
from dbsp_core.planning.imbalance import imbalance_ratio, owned_work
from dbsp_core.planning.planner_input import PlannerInput

__all__ = ["plan_rows"]

HEAD_SHARE = 0.6  # of a hybrid's tolerance, what its Ulysses ranks may take
TURNS = 4  # most turns of whole heads and rows of split heads making way for each other


def plan_rows(
    inputs: PlannerInput,
    *,
    target_rho: float = 1.005,
    head_target_rho: float = 1.002,
) -> tuple[np.ndarray, np.ndarray]:
    """Plans heads, then slots, then single rows.

    Slots are counted (`inputs.count_work_by_slot`) once with a ring, and once more where the plan misses its
    tolerance.

    Args:
        target_rho: ρ_s that is good enough for a ring or hybrid; `head_target_rho` for Ulysses alone.

    Returns:
        int64[H, nq], owner of each row, and int64[H, nk], slot of each KV block.
    """
    row_work, q_home, strategy = inputs.row_work, inputs.q_home, inputs.strategy
    ulysses, ring = strategy.ulysses, strategy.ring
    # 1. Heads to Ulysses ranks; without a ring that is all.
    if ring == 1:
        slots = np.zeros(inputs.kv_block_work.shape, dtype=np.int64)
        owner = balance_heads(row_work, ulysses, head_target_rho)
        rho = imbalance_ratio(owned_work(owner, row_work[:, :, None], ulysses))
        return _unless_staying_is_better(inputs, owner, slots, rho, head_target_rho)
    # moved rows are much cheaper than split heads, but cannot level Ulysses ranks: leave them a part of the tolerance
    unsplit_target = 1 + HEAD_SHARE * (target_rho - 1)
    ulysses_rank = balance_heads(row_work, ulysses, unsplit_target, _interleaved(q_home, ring))
    # 2. KV blocks to ring slots of equal work.
    slots = balance_slots(inputs.kv_block_work, inputs.k_home, _main_ulysses_rank(ulysses_rank, ulysses), ring)
    work_by_slot = inputs.count_work_by_slot(slots)
    schedule = RingSchedule(ulysses, ring)
    # 3. In turn, whole heads swapped and rows of split heads traded within a ring row, which moves no K or V.
    for turn in range(TURNS):
        parts = head_shards(work_by_slot, ulysses_rank, q_home, schedule)
        matched = match_ulysses_ranks(parts, ulysses)
        changed = matched != parts.ulysses_rank  # whole heads only
        ulysses_rank[parts.head[changed]] = matched[changed][:, None]
        work = parts.work_by_rank(matched, ulysses)
        if parts.is_unsplit.all() or imbalance_ratio(work) <= target_rho or (turn > 0 and not changed.any()):
            break
        ulysses_rank, work = trade_rows(work_by_slot, ulysses_rank, q_home, work, schedule, (1 + target_rho) / 2)
        if imbalance_ratio(work) <= target_rho:
            break
    # 4. Single rows moved to other ring ranks, as few as bring ρ_s to the tolerance.
    owner, work = move_rows(work_by_slot, ulysses_rank, q_home, work, schedule, target_rho)
    return _unless_staying_is_better(inputs, owner, slots, imbalance_ratio(work), target_rho)


def _unless_staying_is_better(
    inputs: PlannerInput, owner: np.ndarray, slots: np.ndarray, rho: float, target_rho: float
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the plan of this ρ_s, or the contiguous one where that is more even, as it can be with few rows."""
    if rho > target_rho:
        ulysses, ring = inputs.strategy.ulysses, inputs.strategy.ring
        stay, at_home = contiguous_assignment(inputs.heads, inputs.q_home, inputs.k_home, ulysses)
        work_by_slot = inputs.row_work[:, :, None] if ring == 1 else inputs.count_work_by_slot(at_home)
        if imbalance_ratio(owned_work(stay, work_by_slot, ulysses)) < rho:
            return stay, at_home
    return owner, slots


def _interleaved(q_home: np.ndarray, ring: int) -> np.ndarray:
    """int64[nq]: query blocks in an order that visits the ring ranks in turn, so that a run takes equally from each.

    Where homes differ between heads, the order is the first head's: it only decides how even the start is.
    """
    q_home = q_home if q_home.ndim == 1 else q_home[0]
    turn = np.empty(len(q_home), dtype=np.int64)
    for rank in range(ring):
        mine = q_home == rank
        turn[mine] = np.arange(mine.sum())
    return np.argsort(turn, kind="stable")


def _main_ulysses_rank(ulysses_rank: np.ndarray, ulysses: int) -> np.ndarray:
    """int64[H]: the Ulysses rank with most rows of each head, from int[H, nq]; ties go to the lower one."""
    return np.stack([(ulysses_rank == u).sum(axis=1) for u in range(ulysses)]).argmax(axis=0)
