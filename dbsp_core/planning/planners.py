"""The planners: ours, the paper's, plain sequence parallelism and xDiT's. Only numpy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from dbsp_core.layout.strategy import Strategy
from dbsp_core.masks.grid import BlockGrid
from dbsp_core.planning.balance import closest_pair, exchange, heaviest_first, level, load_limit, work_by_rank
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


def biased_greedy(work: np.ndarray, parts: int, initial: np.ndarray, reward: float) -> np.ndarray:
    """Assigns the largest block first, each to the part with the least work so far, its initial part favoured.

    The load of a block's initial part counts `reward` · (the block's own work) less: §4.2.2 multiplies R_b by the
    block's count, where Alg. 1 prints a constant. Ties go to the lower index. reward 0 is the unbiased greedy. A block
    without work stays where it is: to move it would cost bytes and gain nothing.

    Args:
        work: int[n], active blocks that each block takes part in, summed over heads.
        initial: int[n], the part that holds each block before the exchange.

    Returns:
        int64[n], the part of each block.
    """
    load = [0] * parts
    part = np.empty(len(work), dtype=np.int64)
    for block in heaviest_first(work):
        blocks, best = int(work[block]), int(initial[block])
        if blocks:
            biased: list[float] = [*load]
            biased[best] -= reward * blocks
            best = biased.index(min(biased))
        part[block] = best
        load[best] += blocks
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


def greedy_heads(work: np.ndarray, ulysses_degree: int, cap: int | None = None) -> np.ndarray:
    """Returns int64[H]: the Ulysses ranks of heads of work int[H], the largest first, each to the least work so far.

    Ties go to the lower index. `cap`: most heads of a rank, or None for Alg. 1 as printed.
    """
    load = [0] * ulysses_degree
    count = [0] * ulysses_degree
    ulysses_rank = np.empty(len(work), dtype=np.int64)
    for head in heaviest_first(work).tolist():
        open_ranks = [c for c in range(ulysses_degree) if cap is None or count[c] < cap]
        best = min(open_ranks, key=load.__getitem__)
        ulysses_rank[head] = best
        load[best] += int(work[head])
        count[best] += 1
    return ulysses_rank


def assign_heads(row_work: np.ndarray, columns: int, target_rho: float, order: np.ndarray, price: int) -> np.ndarray:
    """Assigns rows to Ulysses ranks, heads whole or split, so that the slowest rank takes the least time.

    A Ulysses rank's time is its rows' work, at least what is good enough, and `price` for each head of which it has
    rows. Of equally fast plans the first of these is taken.

    Args:
        row_work: int64[H, nq], active blocks of each row.
        columns: x, the number of Ulysses ranks.
        target_rho: Work of the fullest Ulysses rank over the mean that is good enough.
        order: int64[nq], query blocks in the order in which heads are cut.
        price: Active blocks that take as long as receiving the keys and values of one head.

    Returns:
        int64[H, nq], the Ulysses rank of each row.
    """
    if columns == 1:
        return np.zeros_like(row_work)
    work = row_work.sum(axis=1)
    cap = -(-len(work) // columns)
    limit = max(load_limit(int(work.sum()), columns, target_rho), int(row_work.max(initial=0)))
    # 1. Whole heads in equal numbers, so that no rank receives more keys than others.
    equal = exchange(work, greedy_heads(work, columns, cap), columns, limit, cap)
    whole = np.broadcast_to(equal[:, None], row_work.shape)
    load = np.bincount(equal, work, columns).astype(np.int64)
    times = load + price * np.bincount(equal, minlength=columns)
    if load.max() <= limit or times.min() + price >= times.max():
        return whole  # no rank can take part of a head without becoming the slowest
    # 2. Whole heads in any numbers; the fewest cuts; and cuts at the end of every rank, which spread pieces equally.
    free = exchange(work, greedy_heads(work, columns), columns, limit)
    plans = [
        whole,
        np.broadcast_to(free[:, None], row_work.shape),
        _cut_full_ranks(row_work, whole, columns, limit, order),
        _wrap_around(row_work, np.argsort(equal, kind="stable"), columns, order),
    ]
    by_head = [_work_by_head(row_work, plan, columns) for plan in plans]  # [H, x] each
    slowest = [
        (np.maximum(of_plan.sum(axis=0), limit) + price * (of_plan > 0).sum(axis=0)).max() for of_plan in by_head
    ]
    best = slowest.index(min(slowest))
    # 3. Rows without work go to where most of their head is: they must not be what keeps its keys on a rank.
    idle = (row_work == 0) & (work > 0)[:, None]
    return np.where(idle, by_head[best].argmax(axis=1)[:, None], plans[best])


def _wrap_around(row_work: np.ndarray, heads: np.ndarray, columns: int, order: np.ndarray) -> np.ndarray:
    """Returns the Ulysses ranks of rows that are laid end to end, head by head, and cut into x runs (McNaughton)."""
    owner = np.empty(row_work.shape, dtype=np.int64)
    line = row_work[np.ix_(heads, order)]
    owner[np.ix_(heads, order)] = _equal_runs(line.ravel(), columns).reshape(line.shape)
    return owner


def _equal_runs(line: np.ndarray, parts: int) -> np.ndarray:
    """Returns int64[n], the part of each row where a line of them is cut into parts of equal work."""
    middle = np.cumsum(line) - (line + 1) // 2
    return np.minimum(middle * parts // max(1, int(line.sum())), parts - 1)


def _cut_full_ranks(
    row_work: np.ndarray, owner: np.ndarray, columns: int, limit: int, order: np.ndarray
) -> np.ndarray:
    """Returns the Ulysses ranks of rows with none above `limit`, after at most x − 1 cuts of a head off a full rank.

    The fullest goes first, to the least room that takes all its surplus, else to the most room.
    """
    owner, by_head = owner.copy(), _work_by_head(row_work, owner, columns)
    mean = -(-int(row_work.sum()) // columns)
    goal = limit - (limit - mean) // 4  # the rest is for whole rows
    for _ in range(columns - 1):
        load = by_head.sum(axis=0)
        full = int(load.argmax())
        if load[full] <= limit:
            break
        surplus, room = int(load[full]) - goal, goal - load
        enough = np.flatnonzero(room >= surplus)
        target = int(enough[room[enough].argmin()] if len(enough) else room.argmax())
        # 1. Within what the target takes, leave the source between the goal and the mean, clear of both.
        amount = min(int(load[full]) - mean, (surplus + int(room[target])) // 2) if len(enough) else int(room[target])
        # 2. A run of the source's largest head goes.
        head = int(by_head[:, full].argmax())
        work, run = row_work[head], order[owner[head, order] == full]
        run = run[: np.searchsorted(np.cumsum(work[run]), amount, side="right")]
        owner[head, run] = target
        # 3. Single rows, or one for another, bring what goes closer to the amount.
        rest, falling = amount - int(work[run].sum()), heaviest_first(work)
        sizes, held_by = work[falling], owner[head, falling]
        for _ in range(4):
            goes, comes = closest_pair(sizes, np.flatnonzero(held_by == full), np.flatnonzero(held_by == target), rest)
            change = int(sizes[goes].sum() - sizes[comes].sum())
            if abs(change - rest) >= rest:
                break
            held_by[goes], held_by[comes] = target, full
            rest -= change
        owner[head, falling] = held_by
        by_head[head] = np.bincount(owner[head], work, columns)
    return owner


def _work_by_head(row_work: np.ndarray, owner: np.ndarray, columns: int) -> np.ndarray:
    """Returns int64[H, x], active blocks of each head on each Ulysses rank."""
    cell = owner + np.arange(len(owner))[:, None] * columns
    by_head = np.bincount(cell.ravel(), row_work.ravel(), len(owner) * columns)
    return by_head.astype(np.int64).reshape(len(owner), columns)


@dataclass(frozen=True)
class Problem:
    """Input of a planner.

    Attributes:
        row_work: int64[H, nq], active blocks per (head, query block).
        q_ring_rank: int64[nq], ring rank that holds most of each query block; int64[H, nq] where heads have
            token orders of their own.
        price: Active blocks that take as long as receiving the keys of one head: `head_price`, or 0 if ranks are sent
            only the keys that their rows need, of which a split head adds few.
        position: float64[nq], mean position of each query block's tokens, if each rank is sent only the keys that its
            rows need; else None.
    """

    strategy: Strategy
    row_work: np.ndarray
    q_ring_rank: np.ndarray
    price: int = 0
    position: np.ndarray | None = None


@dataclass(frozen=True)
class Planner:
    """A way to assign rows to ranks.

    Attributes:
        assign: Returns int64[H, nq], the owner of each row: ring rank · x + Ulysses rank.
        layout: The sequence layout it is meant for: where blocks are when nothing else is asked for.
    """

    assign: Callable[[Problem], np.ndarray]
    layout: str = "contiguous"


def contiguous(problem: Problem) -> np.ndarray:
    """Plans plain Ulysses, Ring and USP: heads in equal runs, blocks with the ring rank that holds them."""
    column = contiguous_heads(len(problem.row_work), problem.strategy.ulysses)
    return _whole_heads(column, problem.q_ring_rank, problem)


def snake(problem: Problem) -> np.ndarray:
    """Plans xDiT's head balancing: heads, densest first, back and forth in equal numbers; no block migrates."""
    column = snake_heads(problem.row_work.sum(axis=1), problem.strategy.ulysses)
    return _whole_heads(column, problem.q_ring_rank, problem)


def paper(problem: Problem, reward: float = 1.0, equal_heads: bool = False) -> np.ndarray:
    """Runs Alg. 1: greedy heads, then biased greedy query blocks on counts summed over heads.

    What it does with KV blocks balances ring steps, for which nobody waits here: they come from where they live.

    Args:
        reward: R_b ≥ 0 of its biased greedy assignment: how strongly blocks are held where they are.
        equal_heads: True if no Ulysses rank may get more than ceil(H / x) heads.
    """
    if not reward >= 0:
        raise UserError(f"reward={reward} must not be negative; 0 balances without regard to where blocks are")
    x, y, work, initial = problem.strategy.ulysses, problem.strategy.ring, problem.row_work, problem.q_ring_rank
    cap = -(-len(work) // x) if equal_heads else None
    if initial.ndim == 2:  # heads differ: the ring rank of most of them, ties to the lower
        initial = (initial[:, :, None] == np.arange(initial.max() + 1)).sum(axis=0).argmax(axis=1)
    ring_rank = biased_greedy(work.sum(axis=0), y, initial, reward)
    return _whole_heads(greedy_heads(work.sum(axis=1), x, cap), ring_rank, problem)


def _whole_heads(column: np.ndarray, ring_rank: np.ndarray, problem: Problem) -> np.ndarray:
    """Returns int64[H, nq], owners, from int64[H] Ulysses ranks, and int64[nq] or int64[H, nq] ring ranks."""
    return ring_rank * problem.strategy.ulysses + column[:, None]


def dbsp(problem: Problem) -> np.ndarray:
    """Ours: heads whole or split as is faster, few rows moved."""
    x, y = problem.strategy.ulysses, problem.strategy.ring
    return plan_rows(problem.row_work, problem.q_ring_rank, x, y, problem.price, problem.position)


def plan_rows(
    work: np.ndarray,
    q_ring_rank: np.ndarray,
    ulysses: int,
    ring: int,
    price: int = 0,
    position: np.ndarray | None = None,
    target_rho: float = 1.002,
) -> np.ndarray:
    """Assigns rows so that the slowest rank computes and receives the least, and most rows stay where they are.

    A rank's time is its rows' work and a price for each head of its Ulysses rank.

    Args:
        work: int64[H, nq], active blocks of each row.
        q_ring_rank: int64[nq] or int64[H, nq], the ring rank that holds most of each query block.
        ulysses: x, the number of Ulysses ranks, among which heads are distributed.
        ring: y, the number of ring ranks, among which the rows of a head are.
        price: Active blocks that take as long as receiving the keys and values of one head; see also `MOST_PRICE`.
        position: float64[nq], where query blocks are in the order of tokens. Given, each Ulysses rank's rows are cut
            into runs of it instead of staying where they are: rows near one another need much the same keys.
        target_rho: ρ_s at which to stop.

    Returns:
        int64[H, nq], the owner of each row: ring rank · x + Ulysses rank.
    """
    world, total, heaviest = ulysses * ring, int(work.sum()), int(work.max(initial=0))
    limit = max(heaviest, load_limit(total, world, target_rho))
    price = min(price, total // (MOST_PRICE * world))
    # 1. Heads to Ulysses ranks.
    place = position
    if place is None:  # ring ranks interleaved, so that a run takes equally from each
        holder = q_ring_rank if q_ring_rank.ndim == 1 else q_ring_rank[0]
        place = np.cumsum(holder[:, None] == np.arange(ring), axis=0)[np.arange(len(holder)), holder]
    order = np.argsort(place, kind="stable")
    column_rho = target_rho if ring == 1 else (1 + target_rho) / 2  # the other half is for the rows of each
    column = assign_heads(work, ulysses, column_rho, order, price * ring)
    # 2. Each Ulysses rank's rows to its ring ranks.
    if position is not None:
        ring_rank = _runs_by_column(work, column, order, ulysses, ring)
    else:
        ring_rank = np.array(np.broadcast_to(q_ring_rank, work.shape))
        for ulysses_rank in range(ulysses if ring > 1 else 0):
            rows = column == ulysses_rank
            good = max(limit, -(-int(work[rows].sum()) // ring))
            ring_rank[rows] = level(work[rows], ring_rank[rows], ring, good)
    owner = ring_rank * ulysses + column
    # 3. While ranks are still imbalanced, rows go to any rank: many may if keys cost nothing, else few.
    if work_by_rank(owner, work, world).max() <= limit:
        return owner
    times = rank_times(work, owner, ulysses, ring, price)
    levelled = level(work.ravel(), owner.ravel(), world, limit).reshape(work.shape)
    return levelled if rank_times(work, levelled, ulysses, ring, price).max() < times.max() else owner


def rank_times(work: np.ndarray, owner: np.ndarray, ulysses: int, ring: int, price: int) -> np.ndarray:
    """Returns int64[P], what each rank computes and receives before its first kernel, in active blocks."""
    received = np.tile(columns_of_heads(owner, ulysses).sum(axis=0), ring)
    times: np.ndarray = work_by_rank(owner, work, ulysses * ring) + price * received
    return times


def _runs_by_column(work: np.ndarray, column: np.ndarray, order: np.ndarray, ulysses: int, ring: int) -> np.ndarray:
    """Returns int64[H, nq], ring ranks of rows: each column's in runs of equal work, all of its heads side by side."""
    by_block, columns = work[:, order].T, column[:, order].T  # [nq, H]: all heads of a block together
    ring_ranks = np.zeros(by_block.shape, dtype=np.int64)
    for ulysses_rank in range(ulysses):
        here = columns == ulysses_rank
        line = by_block[here]
        ring_ranks[here] = _equal_runs(line if line.any() else np.ones_like(line), ring)
    ring_rank = np.empty(work.shape, dtype=np.int64)
    ring_rank[:, order] = ring_ranks.T
    return ring_rank


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
