"""Planner "dbsp" for needed keys: rows in the order of their tokens, cut into runs of equal work. Only numpy.

Rows near one another need much the same keys, so a run of them needs few. Such runs cannot make every ring step even,
as a ring asks; where a rank is sent only the keys it needs, only its total must be even.
"""

from __future__ import annotations

import numpy as np

from dbsp_core.planning.heads import balance_heads

__all__ = ["cut_rows"]

NEAR = 64  # rows on either side of a cut among which one pair may change sides


def cut_rows(
    row_work: np.ndarray, position: np.ndarray, ulysses: int, ring: int, target_rho: float = 1.002
) -> np.ndarray:
    """Assigns heads to Ulysses ranks, then each Ulysses rank's rows to its ring ranks, in runs.

    Args:
        row_work: int[H, nq], dense blocks per (head, query block).
        position: float[nq], where each query block is in the order of tokens.
        target_rho: ρ_s of Ulysses ranks that is good enough; see `balance_heads`.

    Returns:
        int64[H, nq], the owner of each row: ring rank · ulysses + Ulysses rank.
    """
    # 1. Heads to Ulysses ranks, a few of them split in the order of tokens.
    owner = balance_heads(row_work, ulysses, target_rho, row_order=np.argsort(position, kind="stable"))
    if ring == 1:
        return owner
    # 2. The rows of each, all heads side by side, so that every head is cut at nearly the same places.
    for ulysses_rank in range(ulysses):
        rows = np.flatnonzero(owner == ulysses_rank)
        rows = rows[np.argsort(position[rows % len(position)], kind="stable")]
        work = row_work.reshape(-1)[rows].astype(np.int64)
        owner.reshape(-1)[rows] += _runs(work if work.any() else np.ones_like(work), ring) * ulysses
    return owner


def _runs(work: np.ndarray, parts: int) -> np.ndarray:
    """int64[n]: the part of each row, in runs but for one pair of rows at each cut. `work` is not all 0."""
    total = int(work.sum())
    middle = np.cumsum(work) - (work + 1) // 2
    part = np.minimum(middle * parts // total, parts - 1)
    cuts = np.searchsorted(part, np.arange(parts + 1))
    cuts[0], cuts[-1] = 0, len(work)
    before = np.concatenate([[0], np.cumsum(work)])
    for cut in range(1, parts):
        # the surplus of the parts before this cut, and the pair of rows at it whose swap leaves least of that
        excess = int(before[cuts[cut]]) - (2 * cut * total + parts) // (2 * parts)
        left = np.arange(max(cuts[cut] - NEAR, (cuts[cut - 1] + cuts[cut] + 1) // 2), cuts[cut])
        right = np.arange(cuts[cut], min(cuts[cut] + NEAR, (cuts[cut] + cuts[cut + 1]) // 2))
        if not excess or not len(left) or not len(right):
            continue
        remaining = np.abs(excess - (work[left][:, None] - work[right]))
        goes, comes = divmod(int(remaining.argmin()), len(right))
        if remaining[goes, comes] < abs(excess):
            part[left[goes]], part[right[comes]] = cut, cut - 1
    return part
