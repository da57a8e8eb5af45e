"""Heads to Ulysses columns, split at query-block boundaries where whole heads cannot balance. numpy alone.

Whole heads are assigned largest first and refined by moves and swaps. Where a column stays too full, a run of its
rows is cut off and given to a column with room, the idea of McNaughton's wrap-around rule (Scheduling with deadlines
and loss functions, Management Science 6, 1959): x columns need at most x − 1 cuts. Wrap-around cuts at every column
boundary; starting from whole heads, only columns above the tolerance are cut.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dbsp_core.partition.heads import greedy_heads
from dbsp_core.partition.refine import refine_heads
from dbsp_core.partition.trade import trade_single_rows

__all__ = ["balance_heads"]

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
    column = refine_heads(work, greedy_heads(work, columns), columns, limit)
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
