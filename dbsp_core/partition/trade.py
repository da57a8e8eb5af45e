"""Rows of split heads traded between the columns that share the head, where whole runs cannot balance. numpy alone."""

from __future__ import annotations

import numpy as np

__all__ = ["trade_single_rows"]

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
