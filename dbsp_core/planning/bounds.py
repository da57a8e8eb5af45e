"""Lower bounds on ρ_s: what no plan of a given granularity can beat. Only numpy.

Write T for all dense blocks, P = x·y ranks, and M = Σ_i max_g b(i,g), so that ρ_s = M·P/T. Then
M ≥ Σ_i b(i,g) = the work of any one rank, and M ≥ S/x for the work S of any one slot: in each ring step that slot is
with x ranks, and the ring steps together cover it once. M is a whole number. Every bound below follows from these.
"""

from __future__ import annotations

import numpy as np

__all__ = ["bins_bound", "whole_block_bound", "whole_row_bound"]


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


def _capped_bound(items: np.ndarray, bins: int) -> int:
    """Least possible load of the fullest of `bins` bins that hold at most ceil(n / bins) items each.

    The other bins being full, a bin holds at least n − (bins − 1)·cap items: the largest item has that many, less
    itself, beside it, at best the smallest.
    """
    items = np.sort(items)[::-1]
    least = len(items) - (bins - 1) * -(-len(items) // bins)
    return int(items[0] + items[len(items) - max(0, least - 1) :].sum())


def whole_block_bound(
    row_work: np.ndarray, kv_block_work: np.ndarray, ulysses: int, ring: int, equal_heads: bool = False
) -> float:
    """Bound on ρ_s for plans that give whole heads to Ulysses ranks, and whole blocks to ring ranks and slots.

    Args:
        row_work: int[H, nq], dense blocks per (head, query block).
        kv_block_work: int[H, nk], dense blocks per (head, KV block).
        equal_heads: Whether no Ulysses rank may take more than ceil(H / x) heads.

    Returns:
        a float ≥ 1.
    """
    total = int(row_work.sum())
    if total == 0:
        return 1.0
    heads = row_work.sum(axis=1)
    fullest_ulysses_rank = max(bins_bound(heads, ulysses), _capped_bound(heads, ulysses) if equal_heads else 0)
    slowest = max(
        -(-total // (ulysses * ring)),
        -(-fullest_ulysses_rank // ring),  # a Ulysses rank's work is shared by its y ring ranks
        -(-bins_bound(row_work.sum(axis=0), ring) // ulysses),  # a ring rank's work is shared by its x Ulysses ranks
        -(-bins_bound(kv_block_work.sum(axis=0), ring) // ulysses),  # S/x for the fullest slot
        int(row_work.max()),  # one row has one owner
    )
    return max(1.0, slowest * ulysses * ring / total)


def whole_row_bound(row_work: np.ndarray, kv_block_work: np.ndarray, ulysses: int, ring: int) -> float:
    """Bound on ρ_s for plans that give each (head, query block) row to any one rank: split heads, moved rows.

    M is a whole number, and
    - M ≥ the work of any rank, which is a sum of whole rows: so M ≥ `bins_bound` of all rows in P bins, that is the
      mean rounded up, the largest row, and what two, three, … rows must share by the pigeonhole principle;
    - M ≥ S/x for the work S of any slot. As each (head, KV block) may travel in any slot, the fullest slot has at
      least `bins_bound` of all of them in y bins.

    Args:
        row_work: int[H, nq], dense blocks per (head, query block).
        kv_block_work: int[H, nk], dense blocks per (head, KV block).

    Returns:
        a float ≥ 1.
    """
    total = int(row_work.sum())
    if total == 0:
        return 1.0
    fullest_slot = bins_bound(kv_block_work.reshape(-1), ring)
    slowest = max(bins_bound(row_work.reshape(-1), ulysses * ring), -(-fullest_slot // ulysses))
    return slowest * ulysses * ring / total
