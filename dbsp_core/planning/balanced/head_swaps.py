"""Whole heads exchanged between Ulysses columns until columns agree in every period of every ring row. numpy alone.

Equal totals are not enough in a hybrid: a head along the diagonal has its work in other periods than a head of
columns, and Eq. 1 takes the maximum in each. All that changes here is free: no K or V goes to one more column.
"""

from __future__ import annotations

import numpy as np

from dbsp_core.planning.balanced.work import HeadShards

__all__ = ["match_ulysses_ranks"]

EXACT = 18  # bits to which work is rounded here: products of two then add up exactly in float64


def match_ulysses_ranks(parts: HeadShards, ulysses: int) -> np.ndarray:
    """Moves and swaps whole heads while that lowers the squared differences between columns.

    returns: int64[parts], the column of each part; parts of split heads keep theirs
    """
    before = parts.work_by_rank(parts.column, ulysses)
    ring = len(before)
    largest = max(1, int(before.max()), int(parts.work.max(initial=0)))
    shift = max(0, largest.bit_length() - EXACT)
    vectors = (parts.work >> shift).reshape(-1, ring * ring).astype(np.float64)
    loads = np.zeros((ulysses, ring * ring))
    np.add.at(loads, parts.column, vectors)
    column = parts.column.copy()
    gram = vectors @ vectors.T
    square = np.diag(gram)
    distance = square[:, None] + square - 2 * gram
    fixed = np.flatnonzero(~parts.whole)
    every = np.arange(len(column))
    for _ in range(len(column)):
        fit = vectors @ loads.T  # [parts, x]
        home = fit[every, column]
        swap = fit[:, column] - home[:, None] - home + fit[:, column].T + distance
        swap[column[:, None] == column] = 0
        move = fit - home[:, None] + square[:, None]
        move[every, column] = 0
        change = np.concatenate([move, swap], axis=1)
        change[fixed] = 0
        change[:, ulysses + fixed] = 0
        part, other = divmod(int(change.argmin()), change.shape[1])
        if change[part, other] >= 0:
            break
        source, target = column[part], other if other < ulysses else column[other - ulysses]
        difference = vectors[part] - (vectors[other - ulysses] if other >= ulysses else 0)
        loads[source] -= difference
        loads[target] += difference
        column[part] = target
        if other >= ulysses:
            column[other - ulysses] = source
    after = parts.work_by_rank(column, ulysses)
    return column if after.max(axis=1).sum() < before.max(axis=1).sum() else parts.column
