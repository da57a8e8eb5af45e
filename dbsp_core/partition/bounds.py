"""Lower bounds on ρ_s: what no plan of a given granularity can beat. numpy alone.

Write T for all dense blocks, P = x·y ranks, and M = Σ_i max_g b(i,g), so that ρ_s = M·P/T. Then
M ≥ Σ_i b(i,g) = the work of any one rank, and M ≥ S/x for the work S of any one slot: in each period that slot is
with x ranks, and the periods together cover it once. Every bound below follows from one of the two.
"""

from __future__ import annotations

import numpy as np

__all__ = ["bins_bound", "whole_block_bound"]


def bins_bound(items: np.ndarray, bins: int) -> int:
    """Least possible load of the fullest of `bins` bins when `items` (int[n]) are packed whole.

    The mean, rounded up; and, by the pigeonhole principle for every k, k + 1 of the k·bins + 1 largest items share a
    bin, which then holds at least the k + 1 smallest of them.
    """
    items = np.sort(items)[::-1]
    bound = -(-int(items.sum()) // bins)
    prefix = np.concatenate([[0], np.cumsum(items)])
    for last in range(0, len(items), bins):  # the k·bins + 1 largest are items[: last + 1]
        k = last // bins
        bound = max(bound, int(prefix[last + 1] - prefix[last - k]))
    return bound


def whole_block_bound(rows: np.ndarray, columns: np.ndarray, ulysses: int, ring: int) -> float:
    """Bound on ρ_s for plans that give whole heads to Ulysses columns, and whole blocks to ring ranks and slots.

    rows:    int[H, nq], dense blocks per (head, query block)
    columns: int[H, nk], dense blocks per (head, KV block)
    returns: a float ≥ 1
    """
    total = int(rows.sum())
    if total == 0:
        return 1.0
    slowest = max(
        -(-total // (ulysses * ring)),
        bins_bound(rows.sum(axis=1), ulysses) / ring,  # a column's work is shared by its y ring ranks
        bins_bound(rows.sum(axis=0), ring) / ulysses,  # a ring rank's work is shared by its x columns
        bins_bound(columns.sum(axis=0), ring) / ulysses,  # S/x for the fullest slot
        int(rows.max()),  # one row has one owner
    )
    return max(1.0, slowest * ulysses * ring / total)
