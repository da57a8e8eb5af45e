"""The sparse imbalance ratio ρ_s (paper §3.2, Eq. 1–3). Only numpy."""

from __future__ import annotations

import numpy as np

__all__ = ["imbalance_ratio", "owned_work", "work_by_ring_step"]


def work_by_ring_step(work_by_slot: np.ndarray, ulysses: int) -> np.ndarray:
    """b(i, g) of Eq. 1: dense blocks by (ring step, rank).

    In ring step i, ring rank r computes with slot (r + i) mod y, and r = rank // ulysses.

    Args:
        work_by_slot: int64[..., world, ring].

    Returns:
        int64[..., ring, world].
    """
    world, ring = work_by_slot.shape[-2:]
    rank = np.arange(world)
    ring_step = np.arange(ring)[:, None]
    return work_by_slot[..., rank, (rank // ulysses + ring_step) % ring]


def owned_work(owner: np.ndarray, work_by_slot: np.ndarray, ulysses: int) -> np.ndarray:
    """int64[y, P]: dense blocks by (ring step, rank), where each row is its owner's.

    Args:
        owner: int[H, nq].
        work_by_slot: int[H, nq, y], dense blocks of each row by the slot their keys travel in.
    """
    ring = work_by_slot.shape[2]
    of_slot = (work_by_slot[..., slot].ravel() for slot in range(ring))
    by_rank = [np.bincount(owner.ravel(), one, ulysses * ring) for one in of_slot]
    return work_by_ring_step(np.stack(by_rank, axis=1).astype(np.int64), ulysses)


def imbalance_ratio(work: np.ndarray) -> float:
    """ρ_s of Eq. 1: Σ_i max_g b(i,g) over Σ_i,g b(i,g) / P. One ring step makes it Eq. 2, P ring steps Eq. 3.

    Args:
        work: int64[ring steps, P]. No work at all is balanced: 1.0.
    """
    total = int(work.sum())
    if total == 0:
        return 1.0
    return int(work.max(axis=1).sum()) * work.shape[1] / total
