"""The planners: ours, the paper's, plain sequence parallelism and xDiT's. Numpy only."""

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
"""Scores computed in the time of receiving one token's key and value of one head, not overlapped with a kernel.

FLOP/s · (1 / bytes/s of an all-to-all + 1 / bytes/s of packing) for 2-byte elements: a token has 4·D bytes, a score
4·D FLOP. The constants in configs/hardware give 1,850 on an H200, 1,953 on an H100, 2,157 on an A800 and 3,995 on an
H800; docs/results/even.md shows how little plans differ between them.
"""
MOST_PRICE = 50
"""The price of a head is at most this fraction, a fiftieth, of a rank's mean work.

Without this limit, short videos would stay imbalanced to save keys, whose price is known to a factor of two at best.
By the latency model the limit costs 1 % on average; see docs/results/even.md.
"""


@dataclass(frozen=True)
class Problem:
    """Input of a planner."""

    strategy: Strategy
    row_work: np.ndarray  # int64[H, nq], active blocks per (head, query block)
    # int64[nq], ring rank that holds most of each query block; int64[H, nq] with token orders per head
    q_ring_rank: np.ndarray
    # Time to receive the keys and values of one head, in active blocks: `head_price`, or 0 if only needed keys are
    # sent, since splitting a head then adds few keys. See `MOST_PRICE`.
    price: int = 0
    # float64[nq], mean position of each query block's tokens if only needed keys are sent: planner "dbsp" then cuts
    # rows into runs of tokens, which need similar keys. Else None.
    position: np.ndarray | None = None
    whole_heads: bool = False  # True to not split heads over Ulysses ranks


@dataclass(frozen=True)
class Planner:
    """A way to assign rows to ranks."""

    assign: Callable[[Problem], np.ndarray]  # Returns the owner of each row int64[H, nq]: ring rank · x + Ulysses rank
    layout: str = "contiguous"  # Name of its default sequence layout


def head_price(grid: BlockGrid, strategy: Strategy) -> int:
    """Returns the time to receive one head's keys and values in the first all-to-all, in active blocks.

    The first all-to-all carries the chunk of a rank's own ring row, minus the rank's own part; kernels hide later
    chunks.
    """
    x, y = strategy.ulysses, strategy.ring
    return KEY_PRICE * grid.tokens * (x - 1) // (grid.block_q * grid.block_k * x * y)


def majority_rank(tokens_by_part: np.ndarray) -> np.ndarray:
    """Returns the part with most of each block's tokens (ties: lower index): int[n, parts] → int64[n]."""
    return tokens_by_part.argmax(axis=1).astype(np.int64)


def balanced_majority_rank(tokens_by_part: np.ndarray) -> np.ndarray:
    """Assigns blocks like `majority_rank`, with at most ceil(n / parts) blocks per part: int[n, parts] → int64[n].

    For blocks scattered over all parts, where the majority is arbitrary and often the same part. Blocks with most to
    lose choose first.
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
    """Returns the Ulysses rank of each head int64[H], in nearly equal runs (plain Ulysses)."""
    return np.arange(heads, dtype=np.int64) * ulysses_degree // heads


def snake_heads(work: np.ndarray, ulysses_degree: int) -> np.ndarray:
    """Returns the Ulysses rank of each head int64[H], by descending work int[H] in a snake: 0 1 2 2 1 0 0 1 2 …"""
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
    """Assigns items, largest first, to the part with the least work so far; ties go to the lower index.

    With `initial` this is the biased greedy of §4.2.2: the load of an item's initial part is reduced by `reward` ·
    (the item's work), where Alg. 1 prints a constant. Items without work stay in their initial part.

    Args:
        work: int[n], active blocks of each head, or of each query block in all heads.
        cap: Most items per part; None: no limit, as in Alg. 1.
        initial: int[n], part of each item before the exchange.

    Returns int64[n], the part of each item.
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
    """Assigns rows to Ulysses ranks, with whole or split heads, to minimize the slowest rank's time.

    A Ulysses rank's time is its rows' work (at least the target's) plus `price` for each head with rows on it. Ties go
    to the first of the numbered steps below.

    Args:
        row_work: int64[H, nq], active blocks of each row.
        columns: x, the number of Ulysses ranks.
        target_rho: Acceptable work of the fullest Ulysses rank over the mean.
        order: int64[nq], order of query blocks in which heads are cut.
        price, whole_heads: See `Problem`.

    Returns int64[H, nq], Ulysses rank of each row.
    """
    if columns == 1:
        return np.zeros_like(row_work)
    work = row_work.sum(axis=1)
    cap = -(-len(work) // columns)
    limit = max(load_limit(int(work.sum()), columns, target_rho), int(row_work.max(initial=0)))
    # 1. Whole heads in equal numbers, so that ranks receive equal numbers of keys
    equal = level(work, greedy(work, columns, cap=cap), columns, limit, cap)
    whole = np.broadcast_to(equal[:, None], row_work.shape)
    load = np.bincount(equal, work, columns).astype(np.int64)
    times = load + price * np.bincount(equal, minlength=columns)
    if load.max() <= limit or times.min() + price >= times.max():
        return whole  # taking part of a head would make any rank the slowest
    # 2. Candidates: unequal numbers of heads, the fewest cuts, or cuts at the end of every rank
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
    slowest = [(np.maximum(held.sum(axis=0), limit) + price * (held > 0).sum(axis=0)).max() for held in by_head]
    best = slowest.index(min(slowest))
    # 3. Rows without work follow most of their head, so that they alone do not keep its keys on a rank
    if whole_heads:
        return plans[best]
    idle = (row_work == 0) & (work > 0)[:, None]
    return np.where(idle, by_head[best].argmax(axis=1)[:, None], plans[best])


def _wrap_around(row_work: np.ndarray, heads: np.ndarray, columns: int, order: np.ndarray) -> np.ndarray:
    """Lays rows end to end, head by head, and cuts them into x equal runs (McNaughton); returns Ulysses ranks."""
    owner = np.empty(row_work.shape, dtype=np.int64)
    line = row_work[np.ix_(heads, order)]
    owner[np.ix_(heads, order)] = _equal_runs(line.ravel(), columns).reshape(line.shape)
    return owner


def _equal_runs(line: np.ndarray, parts: int) -> np.ndarray:
    """Cuts a line of rows into parts of equal work (of equal length if there is none); returns parts int64[n]."""
    if not line.any():
        line = np.ones_like(line)
    middle = np.cumsum(line) - (line + 1) // 2
    return np.minimum(middle * parts // max(1, int(line.sum())), parts - 1)


def _cut_full_ranks(
    row_work: np.ndarray, owner: np.ndarray, columns: int, limit: int, order: np.ndarray
) -> np.ndarray:
    """Moves parts of heads from the fullest to the emptiest rank, with at most x − 1 cuts; returns Ulysses ranks."""
    owner, by_head = owner.copy(), _work_by_head(row_work, owner, columns)
    mean = -(-int(row_work.sum()) // columns)
    goal = limit - (limit - mean) // 4  # margin for whole rows
    for _ in range(columns - 1):
        load = by_head.sum(axis=0)
        full, empty = int(load.argmax()), int(load.argmin())
        if load[full] <= limit:
            break
        # 1. Amount that brings both ranks between mean and goal, else as much as fits on the emptiest
        room, surplus = goal - int(load[empty]), int(load[full]) - goal
        amount = min(int(load[full]) - mean, room, (surplus + room) // 2)
        # 2. Move a run of the fullest rank's largest head
        head = int(by_head[:, full].argmax())
        work, run = row_work[head], order[owner[head, order] == full]
        run = run[: np.searchsorted(np.cumsum(work[run]), amount, side="right")]
        owner[head, run] = empty
        # 3. Move or swap single rows to approach the amount
        ours, theirs = (np.flatnonzero(owner[head] == rank) for rank in (full, empty))
        goes, comes = closest_trade(work, ours, theirs, amount - int(work[run].sum()))
        owner[head, goes], owner[head, comes] = empty, full
        by_head[head] = np.bincount(owner[head], work, columns)
    return owner


def _work_by_head(row_work: np.ndarray, owner: np.ndarray, columns: int) -> np.ndarray:
    """Returns active blocks of each head on each Ulysses rank, int64[H, x]."""
    cell = owner + np.arange(len(owner))[:, None] * columns
    by_head = np.bincount(cell.ravel(), row_work.ravel(), len(owner) * columns)
    return by_head.astype(np.int64).reshape(len(owner), columns)


def contiguous(problem: Problem) -> np.ndarray:
    """Plans as plain Ulysses, ring and USP: heads in equal runs, blocks on the ring rank that holds them."""
    column = contiguous_heads(len(problem.row_work), problem.strategy.ulysses)
    return problem.q_ring_rank * problem.strategy.ulysses + column[:, None]


def snake(problem: Problem) -> np.ndarray:
    """Plans as xDiT's head balancing: heads by density in a snake, in equal numbers; blocks do not move."""
    column = snake_heads(problem.row_work.sum(axis=1), problem.strategy.ulysses)
    return problem.q_ring_rank * problem.strategy.ulysses + column[:, None]


def paper(problem: Problem, reward: float = 1.0, equal_heads: bool = False) -> np.ndarray:
    """Plans by Alg. 1: greedy over heads, then biased greedy over query blocks on counts summed over heads.

    Omits Alg. 1's assignment of KV blocks, which balances ring steps: here ranks do not wait for each other in a ring.
    With `equal_heads`, a Ulysses rank has at most ceil(H / x) heads. For `reward` see `PlannerConfig`.
    """
    x, y, work, initial = problem.strategy.ulysses, problem.strategy.ring, problem.row_work, problem.q_ring_rank
    cap = -(-len(work) // x) if equal_heads else None
    if initial.ndim == 2:  # majority over heads, ties to the lower rank
        initial = (initial[:, :, None] == np.arange(initial.max() + 1)).sum(axis=0).argmax(axis=1)
    ring_rank = greedy(work.sum(axis=0), y, initial=initial, reward=reward)
    return ring_rank * x + greedy(work.sum(axis=1), x, cap=cap)[:, None]


def dbsp(problem: Problem, target_rho: float = 1.002) -> np.ndarray:
    """Minimizes the slowest rank's time, rows' work plus a price per head, moving few rows; stops at `target_rho`."""
    x, y, work = problem.strategy.ulysses, problem.strategy.ring, problem.row_work
    total = int(work.sum())
    limit = max(int(work.max(initial=0)), load_limit(total, x * y, target_rho))
    price = min(problem.price, total // (MOST_PRICE * x * y))
    # 1. Heads → Ulysses ranks, cut in an order in which runs take equally from each ring rank
    place = problem.position
    if place is None:
        holder = problem.q_ring_rank if problem.q_ring_rank.ndim == 1 else problem.q_ring_rank[0]
        place = np.cumsum(holder[:, None] == np.arange(y), axis=0)[np.arange(len(holder)), holder]
    order = np.argsort(place, kind="stable")
    column_rho = target_rho if y == 1 else (1 + target_rho) / 2  # leave half the tolerance for step 2
    column = assign_heads(work, x, column_rho, order, price * y, problem.whole_heads)
    # 2. Rows of each Ulysses rank → its ring ranks: move few, or cut all heads into the same runs
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
    # 3. If still imbalanced, move rows to any rank: many if keys cost nothing, else few
    if problem.whole_heads or work_by_rank(owner, work, x * y).max() <= limit:
        return owner
    levelled = level(work.ravel(), owner.ravel(), x * y, limit).reshape(work.shape)
    slowest, slowest_levelled = (rank_times(work, rows, x, y, price).max() for rows in (owner, levelled))
    return levelled if slowest_levelled < slowest else owner


def rank_times(work: np.ndarray, owner: np.ndarray, ulysses: int, ring: int, price: int) -> np.ndarray:
    """Returns each rank's work plus the price of its heads' keys, int64[P], in active blocks."""
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
    """Returns the planner of this name. Raises UserError for unknown names."""
    if name not in PLANNERS:
        raise UserError(f"unknown planner {in_short(name)}; use one of {', '.join(PLANNERS)}")
    return PLANNERS[name]
