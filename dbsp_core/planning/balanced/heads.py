"""Heads to Ulysses columns, split at query-block boundaries where whole heads cannot balance. numpy alone.

Whole heads are assigned largest first and refined by moves and swaps. Where a column stays too full, a run of its
rows is cut off and given to a column with room, the idea of McNaughton's wrap-around rule (Scheduling with deadlines
and loss functions, Management Science 6, 1959): x columns need at most x − 1 cuts. Wrap-around cuts at every column
boundary; starting from whole heads, only columns above the tolerance are cut.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dbsp_core.planning.baselines import greedy_heads

__all__ = ["balance_heads", "local_search_heads", "trade_single_rows"]

PAIR_HEADS = 14  # most heads of two columns together that are shared anew by trying every subset


def local_search_heads(work: np.ndarray, column: np.ndarray, columns: int, limit: int) -> np.ndarray:
    """Moves and swaps whole heads until no column is above `limit`, or the fullest one cannot be helped.

    A step is one head out of the fullest column with or without one in return, or, where none helps, the best of all
    ways to share the heads of the fullest column and another one. Each step makes the fullest column less full.
    work: int[H];  column: int[H];  returns: int64[H]
    """
    column = column.astype(np.int64)
    load = np.bincount(column, weights=work, minlength=columns).astype(np.int64)
    for _ in range(4 * columns + len(work)):
        fullest = int(load.argmax())
        if load[fullest] <= limit or not (
            _swap(work, column, load, fullest) or _share_with_another(work, column, load, fullest)
        ):
            break
    return column


def _swap(work: np.ndarray, column: np.ndarray, load: np.ndarray, fullest: int) -> bool:
    """Makes the best move or swap of one head of `fullest` (in place); False when none lowers its load."""
    mine, others = np.flatnonzero(column == fullest), np.flatnonzero(column != fullest)
    # a head of `fullest` goes; another comes back from the column it goes to, or nothing does
    back = np.concatenate([work[others], np.zeros(len(load), dtype=work.dtype)])
    target = np.concatenate([column[others], np.arange(len(load))])
    change = work[mine][:, None] - back
    after = np.maximum(load[fullest] - change, load[target] + change)
    goes, comes = divmod(int(after.argmin()), len(back))
    if after[goes, comes] >= load[fullest]:
        return False
    load[fullest] -= change[goes, comes]
    load[target[comes]] += change[goes, comes]
    column[mine[goes]] = target[comes]
    if comes < len(others):
        column[others[comes]] = fullest
    return True


def _share_with_another(work: np.ndarray, column: np.ndarray, load: np.ndarray, fullest: int) -> bool:
    """Shares the heads of `fullest` and of the first other column with which it helps anew, as evenly as can be."""
    for other in np.argsort(load, kind="stable"):
        heads = np.flatnonzero((column == fullest) | (column == other))
        if other == fullest or len(heads) > PAIR_HEADS:
            continue
        sums = np.zeros(1, dtype=np.int64)  # sums[m]: work of the subset whose bits are m
        for head in heads:
            sums = np.concatenate([sums, sums + work[head]])
        both = load[fullest] + load[other]
        best = int(np.abs(2 * sums - both).argmin())
        if max(sums[best], both - sums[best]) < load[fullest]:
            column[heads] = np.where(best >> np.arange(len(heads)) & 1, fullest, other)
            load[fullest], load[other] = sums[best], both - sums[best]
            return True
    return False


SHOWN = 128  # rows of each side looked at in a trade


def trade_single_rows(rows: np.ndarray, owner: np.ndarray, inside: np.ndarray, limit: int) -> None:
    """Moves single rows out of the fullest column, or swaps them for others of the same head, down to `limit`.

    Only between columns that both have the head already, so that no K or V is sent once more; each trade makes the
    fullest column less full.
    rows: int[H, nq];  owner: int64[H, nq], changed;  inside: int64[H, x], work of each head in each column, too
    """
    load = inside.sum(axis=0)
    shared = (inside > 0).sum(axis=1) > 1
    for _ in range(4 * len(load)):
        fullest = int(load.argmax())
        heads = np.flatnonzero(shared & (inside[:, fullest] > 0))
        if load[fullest] <= limit or len(heads) == 0:
            return
        lightest = np.where(inside[heads] > 0, load, load.sum() + 1).argmin(axis=1)
        trades = [
            (*_best_trade(rows[h], owner[h], load, fullest, c), h, c)
            for h, c in zip(heads.tolist(), lightest.tolist(), strict=True)
        ]
        after, given, taken, head, other = min(trades)
        if after >= load[fullest]:
            return
        owner[head, given] = other
        work = int(rows[head, given])
        if taken >= 0:
            owner[head, taken] = fullest
            work -= int(rows[head, taken])
        load[[fullest, other]] += [-work, work]
        inside[head, [fullest, other]] += [-work, work]


def _best_trade(
    work: np.ndarray, owner: np.ndarray, load: np.ndarray, fullest: int, other: int
) -> tuple[int, int, int]:
    """(load of the fuller of the two columns afterwards, row given, row taken or −1). work, owner: int[nq]"""
    give, take = np.flatnonzero(owner == fullest)[:SHOWN], np.flatnonzero(owner == other)[:SHOWN]
    if len(give) == 0:
        return int(load[fullest]), -1, -1
    change = work[give, None] - np.append(work[take], 0)
    after = np.maximum(load[fullest] - change, load[other] + change)
    row, column = divmod(int(after.argmin()), after.shape[1])
    return int(after[row, column]), int(give[row]), int(take[column]) if column < len(take) else -1


LOOSER = (1.005, 1.01, 1.02, 1.05, 1.1, 1.2, 1.5)  # tolerances to weigh against each other when a cut has a price


@dataclass(frozen=True)
class Cut:
    """Rows go from column `source` to column `target`, until the load of `source` is `level`."""

    source: int
    target: int
    level: int


def balance_heads(
    rows: np.ndarray, columns: int, tolerance: float = 1.002, split_cost: float = 0.0, order: np.ndarray | None = None
) -> np.ndarray:
    """The Ulysses column of every row: heads whole where that is balanced, a few of them split otherwise.

    rows:       int[H, nq], dense blocks per (head, query block)
    tolerance:  fullest column over mean (ρ_s of U{columns}R1) that is good enough
    split_cost: what one more column for a head's K and V costs, in units of ρ_s; 0 splits until `tolerance` is met
    order:      int[nq], the order of the query blocks in which a head is cut (default: as they stand)
    returns:    int64[H, nq]
    """
    work = rows.sum(axis=1)
    total = int(work.sum())
    mean = -(-total // columns)
    limit = max(mean, int(total * tolerance) // columns)
    column = local_search_heads(work, greedy_heads(work, columns), columns, limit)
    inside = np.zeros((len(work), columns), dtype=np.int64)
    inside[np.arange(len(work)), column] = work
    cuts = _choose_cuts(inside.sum(axis=0).tolist(), limit, split_cost * total / columns)
    owner = np.repeat(column, rows.shape[1]).reshape(rows.shape)
    order = np.arange(rows.shape[1]) if order is None else order
    for cut in cuts:
        _apply_cut(rows, owner, inside, cut, order)
    if split_cost <= 0:
        trade_single_rows(rows, owner, inside, limit)
    if cuts:  # a row without work must not be what keeps a head in a column
        owner = np.where(rows == 0, inside.argmax(axis=1)[:, None], owner)
    return owner


def _choose_cuts(load: list[int], limit: int, price: float) -> list[Cut]:
    """The fewest cuts that bring every column down to `limit`, or, with a price per cut, the cheapest trade.

    load: work per column, whole heads;  price: work in the fullest column that saves as much as one cut costs
    """
    if max(load) <= limit:
        return []
    total, columns = sum(load), len(load)
    mean = -(-total // columns)
    slack = (limit - mean) // 4  # for whole rows
    tight, loose = _plan_cuts(load, mean), _plan_cuts(load, limit - slack)
    choices = [loose if len(loose[0]) < len(tight[0]) else tight]  # down to the mean, if that needs no more cuts
    if price > 0:
        choices += [_plan_cuts(load, max(mean, int(total * looser) // columns)) for looser in LOOSER]
        choices.append(([], max(load)))
    return min(choices, key=lambda choice: max(choice[1], limit) + (price * len(choice[0]) if price > 0 else 0))[0]


def _plan_cuts(load: list[int], limit: int) -> tuple[list[Cut], int]:
    """Cuts that leave no column above `limit`, and the load of the fullest column after them.

    The fullest column goes first, to the least room that takes all its surplus, else to the most room. Each cut
    either settles the column it leaves or fills the column it reaches, and the last does both: at most x − 1 cuts.
    """
    load = list(load)
    columns = range(len(load))
    mean = -(-sum(load) // len(load))
    cuts: list[Cut] = []
    while len(cuts) < len(load) - 1:
        full = max(columns, key=load.__getitem__)
        surplus = load[full] - limit
        if surplus <= 0:
            break
        room = {c: limit - load[c] for c in columns if load[c] < limit}
        enough = [c for c in room if room[c] >= surplus]
        target = min(enough, key=room.__getitem__) if enough else max(room, key=room.__getitem__)
        # within what the target takes, leave the source between `limit` and the mean, clear of both limits
        amount = min(load[full] - mean, (surplus + room[target]) // 2) if enough else room[target]
        load[full] -= amount
        load[target] += amount
        cuts.append(Cut(full, target, load[full]))
    return cuts, max(load)


def _apply_cut(rows: np.ndarray, owner: np.ndarray, inside: np.ndarray, cut: Cut, order: np.ndarray) -> None:
    """Makes a cut in the source's largest head, as near to its level as whole rows allow. Changes owner and inside.

    The rows are a run, and one more row that makes up for what whole rows at the run's end cannot. Levels are the
    source's, so that a head cut many times rounds each boundary to a row and the errors do not add up.
    owner: int64[H, nq];  inside: int64[H, x], work of each head in each column
    """
    head = int(inside[:, cut.source].argmax())
    wish = int(inside[:, cut.source].sum()) - cut.level
    run = order[owner[head, order] == cut.source]
    work = rows[head, run]
    taken = np.concatenate([[0], np.cumsum(work)])  # work of the first 0, 1, 2, … rows
    last = int(np.searchsorted(taken, wish, side="right"))  # the first `last` run lengths do not exceed the wish
    lengths = np.arange(max(0, last - 8), last)
    if len(lengths) == 0:
        return
    extra = np.concatenate([[0], work])
    error = np.abs(wish - taken[lengths, None] - extra)
    error[:, 1:][np.arange(len(work)) < lengths[:, None]] = abs(wish)  # already in the run
    length, one = divmod(int(error.argmin()), len(extra))
    amount = int(taken[lengths[length]] + extra[one])
    if inside[:, cut.target].sum() + amount >= inside[:, cut.source].sum():
        return  # rows too large to help
    chosen = np.append(run[: lengths[length]], run[one - 1 : one] if one else run[:0])
    owner[head, chosen] = cut.target
    inside[head, cut.source] -= amount
    inside[head, cut.target] += amount
