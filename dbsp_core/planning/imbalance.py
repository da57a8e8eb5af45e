"""The sparse imbalance ratio ρ_s (paper §3.2, Eq. 1–3). numpy alone."""

from __future__ import annotations

import numpy as np

__all__ = ["cell_counts", "imbalance_ratio", "row_cells", "work_by_ring_step"]


def row_cells(bits: np.ndarray, kv_slot: np.ndarray, ring: int) -> np.ndarray:
    """Dense blocks of each row by the ring slot their keys travel in.

    bits:    bool[H, nq, nk]
    kv_slot: int[H, nk], slot of each KV block
    returns: int64[H, nq, ring]
    """
    cells = np.empty((*bits.shape[:2], ring), dtype=np.int64)
    for head, (head_bits, slot) in enumerate(zip(bits, kv_slot, strict=True)):
        one_hot = (slot[:, None] == np.arange(ring)).astype(np.float32)
        cells[head] = head_bits.astype(np.float32) @ one_hot  # exact: counts stay below 2**24
    return cells


def cell_counts(bits: np.ndarray, q_owner: np.ndarray, kv_slot: np.ndarray, world: int, ring: int) -> np.ndarray:
    """Dense blocks by (rank that computes them, ring slot their keys travel in).

    bits:    bool[H, nq, nk]
    q_owner: int[H, nq], rank of each row
    kv_slot: int[H, nk], slot of each KV block
    returns: int64[world, ring]
    """
    cells = np.zeros((world, ring), dtype=np.int64)
    np.add.at(cells, q_owner, row_cells(bits, kv_slot, ring))
    return cells


def work_by_ring_step(cells: np.ndarray, ulysses: int) -> np.ndarray:
    """b(i, g) of Eq. 1: dense blocks by (period, rank).

    In period i, ring rank r computes with slot (r + i) mod y, and r = rank // ulysses.
    cells: int64[..., world, ring];  returns: int64[..., ring, world]
    """
    world, ring = cells.shape[-2:]
    rank = np.arange(world)
    period = np.arange(ring)[:, None]
    return cells[..., rank, (rank // ulysses + period) % ring]


def imbalance_ratio(work: np.ndarray) -> float:
    """ρ_s of Eq. 1: Σ_i max_g b(i,g) over Σ_i,g b(i,g) / P. One period makes it Eq. 2, P periods Eq. 3.

    work: int64[periods, P]. No work at all is balanced: 1.0.
    """
    total = int(work.sum())
    if total == 0:
        return 1.0
    return int(work.max(axis=1).sum()) * work.shape[1] / total
