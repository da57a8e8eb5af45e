"""The planners: ours, the paper's, plain sequence parallelism and xDiT's. Only numpy."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from dbsp_core.layout.strategy import Strategy
from dbsp_core.masks.grid import BlockGrid
from dbsp_core.planning.balance import closest_trade, heaviest_first, level, load_limit, work_by_rank
from dbsp_core.planning.chunks import columns_of_heads
from dbsp_core.utils.errors import UserError, in_short

KEY_PRICE = 2048
"""Scores that take as long as receiving one token's key and value of one head, where no kernel hides the receipt.

FLOP/s · (1 / bytes/s of an all-to-all + 1 / bytes/s of packing), for 2-byte elements: 4·D bytes a token come, and a
score takes 4·D FLOP. By the constants in configs/hardware: 1,850 on an H200, 1,953 on an H100, 2,157 on an A800
and 3,995 on an H800; docs/results/even.md shows how little plans differ between them.
"""
MOST_PRICE = 50
"""The price of a head is at most this part, a fiftieth, of a rank's mean work.

Short videos and single heads of a model would otherwise stay imbalanced for the sake of keys whose price is known to a
factor of two at best. By the same model of time that costs 1 % on average; see docs/results/even.md.
"""


@dataclass(frozen=True)
class Problem:
    """Input of a planner.

    Attributes:
        row_work: int64[H, nq], active blocks per (head, query block).
        q_ring_rank: int64[nq], ring rank that holds most of each query block; int64[H, nq] where heads have
            token orders of their own.
        price: Active blocks that take as long as receiving the keys and values of one head: `head_price`, or 0 if
            ranks are sent only the keys that their rows need, of which a split head adds few. See also `MOST_PRICE`.
        position: float64[nq], mean position of each query block's tokens, if each rank is sent only the keys that its
            rows need: planner "dbsp" then cuts rows into runs of tokens, which need much the same keys. Else None.
        whole_heads: True if no head may have rows in two Ulysses ranks, as some kernels require.
    """

    strategy: Strategy
    row_work: np.ndarray
    q_ring_rank: np.ndarray
    price: int = 0
    position: np.ndarray | None = None
    whole_heads: bool = False


@dataclass(frozen=True)
class Planner:
    """A way to assign rows to ranks.

    Attributes:
        assign: Returns int64[H, nq], the owner of each row: ring rank · x + Ulysses rank.
        layout: The sequence layout it is meant for: where blocks are when nothing else is asked for.
    """

    assign: Callable[[Problem], np.ndarray]
    layout: str = "contiguous"


def head_price(grid: BlockGrid, strategy: Strategy) -> int:
    """Returns the active blocks that take as long as receiving one head's keys and values in the first all-to-all.

    It brings the chunk of a rank's own ring row, all but the rank's own part of it; kernels hide the later chunks.
    """
    x, y = strategy.ulysses, strategy.ring
    return KEY_PRICE * grid.tokens * (x - 1) // (grid.block_q * grid.block_k * x * y)


def majority_rank(tokens_by_part: np.ndarray) -> np.ndarray:
    """Returns int64[n]: of int[n, parts], the part that holds most of each block's tokens; ties: the lower index."""
    return tokens_by_part.argmax(axis=1).astype(np.int64)


def balanced_majority_rank(tokens_by_part: np.ndarray) -> np.ndarray:
    """Assigns as `majority_rank` does, but no part gets more than its even share of blocks, rounded up.

    For blocks whose tokens lie scattered over all parts: the most tokens would be an accident, and the same for most.
    Blocks with most to lose choose first. int[n, parts] → int64[n].
    """
    blocks, parts = tokens_by_part.shape
    room = [-(-blocks // parts)] * parts
    preferences = np.argsort(-tokens_by_part, axis=1, kind="stable").tolist()
    part = np.empty(blocks, dtype=np.int64)
    for block in heaviest_first(tokens_by_part.max(axis=1)).tolist():
        part[block] = next(preferred for preferred in preferences[block] if room[preferred])
        room[part[block]] -= 1
    return part


def contiguous_heads(heads: int, ulysses_degree: int) -> np.ndarray:
    """Returns int64[H]: the Ulysses ranks of heads in order, in runs as equal as they come (Ulysses)."""
    return np.arange(heads, dtype=np.int64) * ulysses_degree // heads


def snake_heads(work: np.ndarray, ulysses_degree: int) -> np.ndarray:
    """Returns int64[H]: the Ulysses ranks of heads, by falling work int[H] back and forth: 0 1 2 2 1 0 0 1 2 …"""
    turn, column = np.divmod(np.arange(len(work)), ulysses_degree)
    ulysses_rank = np.empty(len(work), dtype=np.int64)
    ulysses_rank[heaviest_first(work)] = np.where(turn % 2 == 0, column, ulysses_degree - 1 - column)
    return ulysses_rank


def greedy(
    work: np.ndarray,
    parts: int,
    *,
    cap: int | None = None,
    initial: np.ndarray | None = None,
    reward: float = 0.0,
) -> np.ndarray:
    """Assigns the largest item first, each to the part with the least work so far; ties go to the lower index.

    With `initial` it is the biased greedy of §4.2.2: the load of an item's initial part counts `reward` · (the item's
    own work) less, where Alg. 1 prints a constant. An item without work stays there: to move it would gain nothing.

    Args:
        work: int[n], active blocks of each head, or of each query block in all heads.
        cap: Most items of a part, or None for Alg. 1 as printed.
        initial: int[n], the part that holds each item before the exchange.

    Returns:
        int64[n], the part of each item.
    """
    load, count = [0] * parts, [0] * parts
    part = np.empty(len(work), dtype=np.int64)
    for item in heaviest_first(work).tolist():
        blocks = int(work[item])
        biased = [math.inf if items == cap else total for total, items in zip(load, count, strict=True)]
        if initial is not None:
            biased[initial[item]] -= reward * blocks if blocks else math.inf
        best = biased.index(min(biased))
        part[item] = best
        load[best] += blocks
        count[best] += 1
    return part


def assign_heads(
    row_work: np.ndarray, columns: int, target_rho: float, order: np.ndarray, price: int, whole_heads: bool = False
) -> np.ndarray:
    """Assigns rows to Ulysses ranks, heads whole or split, so that the slowest rank takes the least time.

    A Ulysses rank's time is its rows' work, at least what is good enough, and `price` for each head of which it has
    rows. Of equally fast plans the first of these is taken.

    Args:
        row_work: int64[H, nq], active blocks of each row.
        columns: x, the number of Ulysses ranks.
        target_rho: Work of the fullest Ulysses rank over the mean that is good enough.
        order: int64[nq], query blocks in the order in which heads are cut.
        price: Active blocks that take as long as receiving the keys and values of one head.
        whole_heads: True if no head may be split.

    Returns:
        int64[H, nq], the Ulysses rank of each row.
    """
    if columns == 1:
        return np.zeros_like(row_work)
    work = row_work.sum(axis=1)
    cap = -(-len(work) // columns)
    limit = max(load_limit(int(work.sum()), columns, target_rho), int(row_work.max(initial=0)))
    # 1. Whole heads in equal numbers, so that no rank receives more keys than others.
    equal = level(work, greedy(work, columns, cap=cap), columns, limit, cap)
    whole = np.broadcast_to(equal[:, None], row_work.shape)
    load = np.bincount(equal, work, columns).astype(np.int64)
    times = load + price * np.bincount(equal, minlength=columns)
    if load.max() <= limit or times.min() + price >= times.max():
        return whole  # no rank can take part of a head without becoming the slowest
    # 2. The fewest cuts; and cuts at the end of every rank, which spread pieces equally. Or other numbers of heads.
    if whole_heads:
        uneven = level(work, greedy(work, columns), columns, limit)
        plans = [whole, np.broadcast_to(uneven[:, None], row_work.shape)]
    else:
        plans = [
            whole,
            _cut_full_ranks(row_work, whole, columns, limit, order),
            _wrap_around(row_work, np.argsort(equal, kind="stable"), columns, order),
        ]
    by_head = [_work_by_head(row_work, plan, columns) for plan in plans]  # [H, x] each
    slowest = [
        (np.maximum(of_plan.sum(axis=0), limit) + price * (of_plan > 0).sum(axis=0)).max() for of_plan in by_head
    ]
    best = slowest.index(min(slowest))
    # 3. Rows without work go to where most of their head is: they must not be what keeps its keys on a rank.
    if whole_heads:
        return plans[best]
    idle = (row_work == 0) & (work > 0)[:, None]
    return np.where(idle, by_head[best].argmax(axis=1)[:, None], plans[best])


def _wrap_around(row_work: np.ndarray, heads: np.ndarray, columns: int, order: np.ndarray) -> np.ndarray:
    """Returns the Ulysses ranks of rows that are laid end to end, head by head, and cut into x runs (McNaughton)."""
    owner = np.empty(row_work.shape, dtype=np.int64)
    line = row_work[np.ix_(heads, order)]
    owner[np.ix_(heads, order)] = _equal_runs(line.ravel(), columns).reshape(line.shape)
    return owner


def _equal_runs(line: np.ndarray, parts: int) -> np.ndarray:
    """Returns int64[n], the part of each row where a line of them is cut into parts of equal work, else of length."""
    if not line.any():
        line = np.ones_like(line)
    middle = np.cumsum(line) - (line + 1) // 2
    return np.minimum(middle * parts // max(1, int(line.sum())), parts - 1)


def _cut_full_ranks(
    row_work: np.ndarray, owner: np.ndarray, columns: int, limit: int, order: np.ndarray
) -> np.ndarray:
    """Returns the Ulysses ranks of rows after at most x − 1 cuts of a head off the fullest rank, for the emptiest."""
    owner, by_head = owner.copy(), _work_by_head(row_work, owner, columns)
    mean = -(-int(row_work.sum()) // columns)
    goal = limit - (limit - mean) // 4  # the rest is for whole rows
    for _ in range(columns - 1):
        load = by_head.sum(axis=0)
        full, empty = int(load.argmax()), int(load.argmin())
        if load[full] <= limit:
            break
        # 1. As much as brings both between the goal and the mean, clear of both; else what the emptiest has room for.
        room, surplus = goal - int(load[empty]), int(load[full]) - goal
        amount = min(int(load[full]) - mean, room, (surplus + room) // 2)
        # 2. A run of the fullest rank's largest head goes.
        head = int(by_head[:, full].argmax())
        work, run = row_work[head], order[owner[head, order] == full]
        run = run[: np.searchsorted(np.cumsum(work[run]), amount, side="right")]
        owner[head, run] = empty
        # 3. Another row, or one for another, brings what goes closer to the amount.
        ours, theirs = (np.flatnonzero(owner[head] == rank) for rank in (full, empty))
        goes, comes = closest_trade(work, ours, theirs, amount - int(work[run].sum()))
        owner[head, goes], owner[head, comes] = empty, full
        by_head[head] = np.bincount(owner[head], work, columns)
    return owner


def _work_by_head(row_work: np.ndarray, owner: np.ndarray, columns: int) -> np.ndarray:
    """Returns int64[H, x], active blocks of each head on each Ulysses rank."""
    cell = owner + np.arange(len(owner))[:, None] * columns
    by_head = np.bincount(cell.ravel(), row_work.ravel(), len(owner) * columns)
    return by_head.astype(np.int64).reshape(len(owner), columns)


def contiguous(problem: Problem) -> np.ndarray:
    """Plans plain Ulysses, Ring and USP: heads in equal runs, blocks with the ring rank that holds them."""
    column = contiguous_heads(len(problem.row_work), problem.strategy.ulysses)
    return problem.q_ring_rank * problem.strategy.ulysses + column[:, None]


def snake(problem: Problem) -> np.ndarray:
    """Plans xDiT's head balancing: heads, densest first, back and forth in equal numbers; no block migrates."""
    column = snake_heads(problem.row_work.sum(axis=1), problem.strategy.ulysses)
    return problem.q_ring_rank * problem.strategy.ulysses + column[:, None]


def paper(problem: Problem, reward: float = 1.0, equal_heads: bool = False) -> np.ndarray:
    """Runs Alg. 1: greedy heads, then biased greedy query blocks on counts summed over heads.

    What it does with KV blocks balances ring steps, for which nobody waits here: they come from where they live.

    Args:
        reward: See `PlannerConfig`.
        equal_heads: True if no Ulysses rank may get more than ceil(H / x) heads.
    """
    x, y, work, initial = problem.strategy.ulysses, problem.strategy.ring, problem.row_work, problem.q_ring_rank
    cap = -(-len(work) // x) if equal_heads else None
    if initial.ndim == 2:  # heads differ: the ring rank of most of them, ties to the lower
        initial = (initial[:, :, None] == np.arange(initial.max() + 1)).sum(axis=0).argmax(axis=1)
    ring_rank = greedy(work.sum(axis=0), y, initial=initial, reward=reward)
    return ring_rank * x + greedy(work.sum(axis=1), x, cap=cap)[:, None]


def dbsp(problem: Problem, target_rho: float = 1.002) -> np.ndarray:
    """Ours: the slowest rank computes and receives the least, and most rows stay where they are.

    A rank's time is its rows' work and a price for each head of its Ulysses rank.

    Args:
        target_rho: ρ_s at which to stop.
    """
    x, y, work = problem.strategy.ulysses, problem.strategy.ring, problem.row_work
    total = int(work.sum())
    limit = max(int(work.max(initial=0)), load_limit(total, x * y, target_rho))
    price = min(problem.price, total // (MOST_PRICE * x * y))
    # 1. Heads to Ulysses ranks. Where they are cut, a run takes equally from each ring rank.
    place = problem.position
    if place is None:
        holder = problem.q_ring_rank if problem.q_ring_rank.ndim == 1 else problem.q_ring_rank[0]
        place = np.cumsum(holder[:, None] == np.arange(y), axis=0)[np.arange(len(holder)), holder]
    order = np.argsort(place, kind="stable")
    column_rho = target_rho if y == 1 else (1 + target_rho) / 2  # the other half is for the rows of each
    column = assign_heads(work, x, column_rho, order, price * y, problem.whole_heads)
    # 2. Each Ulysses rank's rows to its ring ranks: few move, or they are cut into runs, all heads side by side.
    ring_rank = np.zeros_like(work) + problem.q_ring_rank
    for ulysses_rank in range(x if y > 1 else 0):
        if problem.position is None:
            rows = np.flatnonzero(column.ravel() == ulysses_rank)
            row_work = work.ravel()[rows]
            good = max(limit, -(-int(row_work.sum()) // y))
            ring_rank.ravel()[rows] = level(row_work, ring_rank.ravel()[rows], y, good)
        else:
            run, head = np.nonzero(column.T[order] == ulysses_rank)
            ring_rank[head, order[run]] = _equal_runs(work[head, order[run]], y)
    owner = ring_rank * x + column
    # 3. While ranks are still imbalanced, rows go to any rank: many may if keys cost nothing, else few.
    if problem.whole_heads or work_by_rank(owner, work, x * y).max() <= limit:
        return owner
    levelled = level(work.ravel(), owner.ravel(), x * y, limit).reshape(work.shape)
    slowest, slowest_levelled = (rank_times(work, rows, x, y, price).max() for rows in (owner, levelled))
    return levelled if slowest_levelled < slowest else owner


def rank_times(work: np.ndarray, owner: np.ndarray, ulysses: int, ring: int, price: int) -> np.ndarray:
    """Returns int64[P], what each rank computes and receives before its first kernel, in active blocks."""
    received = np.tile(columns_of_heads(owner, ulysses).sum(axis=0), ring)
    times: np.ndarray = work_by_rank(owner, work, ulysses * ring) + price * received
    return times


PLANNERS = {
    "dbsp": Planner(dbsp, layout="striped"),
    "contiguous": Planner(contiguous),
    "snake": Planner(snake),
    "paper": Planner(paper),
}


def require_planner(name: str) -> Planner:
    """Returns the planner of that name. Raises UserError when there is none."""
    if name not in PLANNERS:
        raise UserError(f"unknown planner {in_short(name)}; use one of {', '.join(PLANNERS)}")
    return PLANNERS[name]
