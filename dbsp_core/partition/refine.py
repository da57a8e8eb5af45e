"""Local search on whole heads: out of the fullest column while that makes it less full. numpy alone."""

from __future__ import annotations

import numpy as np

__all__ = ["refine_heads"]

PAIR_HEADS = 14  # most heads of two columns together that are shared anew by trying every subset


def refine_heads(work: np.ndarray, column: np.ndarray, columns: int, limit: int) -> np.ndarray:
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
