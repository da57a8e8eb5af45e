"""The sparse imbalance ratio ρ_s (paper §3.2) of ranks' totals, and what no plan can beat. Only numpy.

Keys come in chunks, for which no rank waits for another: of Eq. 1 to 3 the sums over ring steps remain, Eq. 2.
"""

from __future__ import annotations

import numpy as np

__all__ = ["bins_bound", "imbalance_ratio", "rho_bound", "work_by_rank"]


def work_by_rank(owner: np.ndarray, row_work: np.ndarray, world: int) -> np.ndarray:
    """int64[P]: dense blocks of each rank, from int64[H, nq] each: the rows' ranks, and dense blocks."""
    return np.bincount(owner.ravel(), row_work.ravel(), world).astype(np.int64)


def imbalance_ratio(work: np.ndarray) -> float:
    """ρ_s: the slowest rank's work over the mean, from int64[P]. No work at all is balanced: 1.0."""
    total = int(work.sum())
    return int(work.max()) * len(work) / total if total else 1.0


def rho_bound(row_work: np.ndarray, world: int) -> float:
    """ρ_s ≥ 1 that no plan of whole rows can beat, from int64[H, nq] dense blocks of each row."""
    total = int(row_work.sum())
    return bins_bound(row_work.ravel(), world) * world / total if total else 1.0


def bins_bound(items: np.ndarray, bins: int) -> int:
    """Least possible load of the fullest of `bins` bins when `items` (int[n]) are packed whole.

    The mean, rounded up; and, by the pigeonhole principle for every k, k + 1 of the k·bins + 1 largest items share a
    bin, which then holds at least the k + 1 smallest of them.
    """
    total = int(items.sum())
    if bins == 1:
        return total
    small = items.astype(np.uint16) if items.max(initial=0) < 1 << 16 else items  # sorted by radix: much faster
    prefix = np.zeros(len(items) + 1, dtype=np.int64)
    np.cumsum(np.sort(small, kind="stable")[::-1], out=prefix[1:])
    bound = -(-total // bins)
    last = np.arange(0, len(items), bins)  # the k·bins + 1 largest are items[: last + 1]
    return max(bound, int((prefix[last + 1] - prefix[last - last // bins]).max(initial=0)))
