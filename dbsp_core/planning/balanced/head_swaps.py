"""Whole heads exchanged between Ulysses ranks until they agree in every ring step of every ring row. Only numpy.

Equal totals are not enough in a hybrid: a head with its work along the diagonal is busy in other ring steps than a
head whose work is elsewhere, and Eq. 1 takes the maximum in each step. All changes here are free: no K or V goes to
one more Ulysses rank.
"""

from __future__ import annotations

import numpy as np

from dbsp_core.planning.balanced.work import HeadShards

__all__ = ["match_ulysses_ranks"]

EXACT = 18  # bits to which work is rounded here: products of two then add up exactly in float64


def match_ulysses_ranks(parts: HeadShards, ulysses: int) -> np.ndarray:
    """Moves and swaps whole heads while that lowers the squared differences between Ulysses ranks.

    Returns:
        int64[parts], the Ulysses rank of each part; parts of split heads keep theirs.
    """
    before = parts.work_by_rank(parts.ulysses_rank, ulysses)
    ring = len(before)
    largest = max(1, int(before.max()), int(parts.work.max(initial=0)))
    shift = max(0, largest.bit_length() - EXACT)
    vectors = (parts.work >> shift).reshape(-1, ring * ring).astype(np.float64)
    loads = np.zeros((ulysses, ring * ring))
    np.add.at(loads, parts.ulysses_rank, vectors)
    ulysses_rank = parts.ulysses_rank.copy()
    gram = vectors @ vectors.T
    square = np.diag(gram)
    distance = square[:, None] + square - 2 * gram
    fixed = np.flatnonzero(~parts.is_unsplit)
    every = np.arange(len(ulysses_rank))
    for _ in range(len(ulysses_rank)):
        fit = vectors @ loads.T  # [parts, x]
        home = fit[every, ulysses_rank]
        swap = fit[:, ulysses_rank] - home[:, None] - home + fit[:, ulysses_rank].T + distance
        swap[ulysses_rank[:, None] == ulysses_rank] = 0
        move = fit - home[:, None] + square[:, None]
        move[every, ulysses_rank] = 0
        change = np.concatenate([move, swap], axis=1)
        change[fixed] = 0
        change[:, ulysses + fixed] = 0
        part, other = divmod(int(change.argmin()), change.shape[1])
        if change[part, other] >= 0:
            break
        source, target = ulysses_rank[part], other if other < ulysses else ulysses_rank[other - ulysses]
        difference = vectors[part] - (vectors[other - ulysses] if other >= ulysses else 0)
        loads[source] -= difference
        loads[target] += difference
        ulysses_rank[part] = target
        if other >= ulysses:
            ulysses_rank[other - ulysses] = source
    after = parts.work_by_rank(ulysses_rank, ulysses)
    return ulysses_rank if after.max(axis=1).sum() < before.max(axis=1).sum() else parts.ulysses_rank
