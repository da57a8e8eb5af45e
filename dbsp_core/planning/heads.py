"""Heads to Ulysses ranks: whole, or some of them split where that saves more time than their keys cost. Only numpy.

A split head's keys and values are received by two Ulysses ranks, before the first kernel, so a split has a price.
Heads are cut into runs of rows, the idea of McNaughton's wrap-around rule (Scheduling with deadlines and loss
functions, Management Science 6, 1959): x Ulysses ranks need at most x − 1 cuts.
"""

from __future__ import annotations

import numpy as np

from dbsp_core.planning.rows import exchange_rows, load_limit, rows_to_trade


def contiguous_heads(heads: int, ulysses_degree: int) -> np.ndarray:
    """Heads in order, in runs as equal as they come (Ulysses).

    Returns:
        int64[H], the Ulysses rank of each head.
    """
    return np.arange(heads, dtype=np.int64) * ulysses_degree // heads


def snake_heads(work: np.ndarray, ulysses_degree: int) -> np.ndarray:
    """Heads by falling work, assigned back and forth: 0 1 2 2 1 0 0 1 2 …

    Args:
        work: int[H], active blocks per head.

    Returns:
        int64[H], the Ulysses rank of each head.
    """
    turn, column = np.divmod(np.arange(len(work)), ulysses_degree)
    ulysses_rank = np.empty(len(work), dtype=np.int64)
    ulysses_rank[np.argsort(-work, kind="stable")] = np.where(turn % 2 == 0, column, ulysses_degree - 1 - column)
    return ulysses_rank


def greedy_heads(work: np.ndarray, ulysses_degree: int, cap: int | None = None) -> np.ndarray:
    """Assigns the largest head first, each to the Ulysses rank with the least work so far; ties go to the lower index.

    Args:
        work: int[H], active blocks per head.
        cap: Most heads a Ulysses rank may take, or None for Alg. 1 as printed.

    Returns:
        int64[H], the Ulysses rank of each head.
    """
    if cap is not None and cap * ulysses_degree < len(work):
        least = -(-len(work) // ulysses_degree)
        raise ValueError(f"{len(work)} heads do not fit {ulysses_degree} ranks of at most {cap}; use cap ≥ {least}")
    load = [0] * ulysses_degree
    count = [0] * ulysses_degree
    ulysses_rank = np.empty(len(work), dtype=np.int64)
    for head in np.argsort(-work, kind="stable").tolist():
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
    heads, work = len(row_work), row_work.sum(axis=1)
    cap = -(-heads // columns)
    limit = max(load_limit(int(work.sum()), columns, target_rho), int(row_work.max(initial=0)))
    # 1. Whole heads in equal numbers, so that no rank receives more keys than others.
    equal = exchange_rows(work, greedy_heads(work, columns, cap), columns, limit, cap)
    load = np.bincount(equal, work, columns).astype(np.int64)
    times = load + price * np.bincount(equal, minlength=columns)
    if load.max() <= limit or times.min() + price >= times.max():
        return _whole_heads(equal, row_work)  # no rank can take part of a head without becoming the slowest
    # 2. Whole heads in any numbers; the fewest cuts; and cuts at the end of every rank, which spread pieces equally.
    whole = _whole_heads(equal, row_work)
    free = exchange_rows(work, greedy_heads(work, columns), columns, limit)
    plans = [
        whole,
        _whole_heads(free, row_work),
        _cut_full_ranks(row_work, whole, columns, limit, order),
        _wrap_around(row_work, np.argsort(equal, kind="stable"), columns, order),
    ]
    by_head = [_work_by_head(row_work, plan, columns) for plan in plans]
    slowest = [
        (np.maximum(of_plan.sum(axis=0), limit) + price * (of_plan > 0).sum(axis=0)).max() for of_plan in by_head
    ]
    best = slowest.index(min(slowest))
    # 3. Rows without work go to where most of their head is: they must not be what keeps its keys on a rank.
    idle = (row_work == 0) & (work > 0)[:, None]
    return np.where(idle, by_head[best].argmax(axis=1)[:, None], plans[best])


def _whole_heads(column: np.ndarray, row_work: np.ndarray) -> np.ndarray:
    """Returns int64[H, nq], the Ulysses rank of each row, from that of each head."""
    return np.repeat(column, row_work.shape[1]).reshape(row_work.shape)


def _wrap_around(row_work: np.ndarray, heads: np.ndarray, columns: int, order: np.ndarray) -> np.ndarray:
    """Lays the rows of all heads end to end and cuts them into x runs of equal work (McNaughton).

    Args:
        heads: int64[H], the heads in the order in which they are laid.
    """
    line = row_work[np.ix_(heads, order)]
    middle = np.cumsum(line).reshape(line.shape) - (line + 1) // 2
    owner = np.empty(row_work.shape, dtype=np.int64)
    owner[np.ix_(heads, order)] = np.minimum(middle * columns // max(1, int(line.sum())), columns - 1)
    return owner


def _cut_full_ranks(
    row_work: np.ndarray, owner: np.ndarray, columns: int, limit: int, order: np.ndarray
) -> np.ndarray:
    """Cuts runs of rows off full Ulysses ranks until none is above `limit`, with at most x − 1 cuts.

    The fullest goes first, to the least room that takes all its surplus, else to the most room.

    Args:
        owner: int64[H, nq], the Ulysses rank of each row.

    Returns:
        The same after the cuts.
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
        # Within what the target takes, leave the source between the goal and the mean, clear of both.
        amount = min(int(load[full]) - mean, (surplus + int(room[target])) // 2) if len(enough) else int(room[target])
        head = int(by_head[:, full].argmax())
        _move_run(row_work[head], owner[head], full, target, amount, order)
        by_head[head] = np.bincount(owner[head], row_work[head], columns)
    return owner


def _move_run(work: np.ndarray, owner: np.ndarray, source: int, target: int, amount: int, order: np.ndarray) -> None:
    """Moves rows of one head from one Ulysses rank to another: a run, and what brings it closest to `amount`.

    Args:
        work: int64[nq], active blocks of the head's rows.
        owner: int64[nq], changed in place.
    """
    run = order[owner[order] == source]
    run = run[: int(np.searchsorted(np.cumsum(work[run]), amount, side="right"))]
    owner[run] = target
    rest = amount - int(work[run].sum())
    falling = np.argsort(-work, kind="stable")
    sizes, held_by = work[falling], owner[falling]
    leaving, coming = rows_to_trade(sizes, np.flatnonzero(held_by == source), np.flatnonzero(held_by == target), rest)
    if abs(int(sizes[leaving].sum() - sizes[coming].sum()) - rest) < rest:
        owner[falling[leaving]], owner[falling[coming]] = target, source


def _work_by_head(row_work: np.ndarray, owner: np.ndarray, columns: int) -> np.ndarray:
    """Returns int64[H, x], active blocks of each head on each Ulysses rank."""
    cell = owner + np.arange(len(owner))[:, None] * columns
    by_head = np.bincount(cell.ravel(), row_work.ravel(), len(owner) * columns)
    return by_head.astype(np.int64).reshape(len(owner), columns)
