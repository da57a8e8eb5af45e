"""What sequence parallelism does without balancing: heads in equal runs, blocks where they are. numpy alone."""

from __future__ import annotations

import numpy as np

__all__ = ["contiguous_heads", "dealt_heads", "level_residents", "resident_parts", "stay_at_home", "whole"]


def contiguous_heads(heads: int, columns: int) -> np.ndarray:
    """Heads in order, in runs as equal as they come (Ulysses). returns: int64[H], the column of each head."""
    return np.arange(heads, dtype=np.int64) * columns // heads


def dealt_heads(work: np.ndarray, columns: int) -> np.ndarray:
    """Heads by falling work, dealt out to and fro: 0 1 2 2 1 0 0 1 2 …

    work: int[H], dense blocks per head;  returns: int64[H], the column of each head
    """
    turn, place = np.divmod(np.arange(len(work)), columns)
    column = np.empty(len(work), dtype=np.int64)
    column[np.argsort(-work, kind="stable")] = np.where(turn % 2 == 0, place, columns - 1 - place)
    return column


def resident_parts(tokens_by_part: np.ndarray) -> np.ndarray:
    """Each block stays with the part that holds most of its tokens; ties go to the lower index (Ring).

    tokens_by_part: int[n, parts];  returns: int64[n]
    """
    return tokens_by_part.argmax(axis=1).astype(np.int64)


def level_residents(tokens_by_part: np.ndarray) -> np.ndarray:
    """As `resident_parts`, but no part gets more than its even share of blocks, rounded up.

    For blocks whose tokens lie scattered over all parts: the most tokens would be an accident, and the same for most.
    Blocks with most to lose choose first.
    tokens_by_part: int[n, parts];  returns: int64[n]
    """
    blocks, parts = tokens_by_part.shape
    room = [-(-blocks // parts)] * parts
    wishes = np.argsort(-tokens_by_part, axis=1, kind="stable").tolist()
    part = np.empty(blocks, dtype=np.int64)
    for block in np.argsort(-tokens_by_part.max(axis=1), kind="stable").tolist():
        part[block] = next(wish for wish in wishes[block] if room[wish])
        room[part[block]] -= 1
    return part


def whole(column: np.ndarray, q_ring: np.ndarray, slot: np.ndarray, columns: int) -> tuple[np.ndarray, np.ndarray]:
    """Whole heads to Ulysses columns and whole blocks to ring ranks and slots: owner = ring rank · x + column.

    column: int64[H];  q_ring: int64[nq] or [H, nq];  slot: int64[nk] or [H, nk];  columns: x
    returns: int64[H, nq] owner of each row, int64[H, nk] slot of each KV block
    """
    return q_ring * columns + column[:, None], np.tile(slot, (len(column), 1)) if slot.ndim == 1 else slot.copy()


def stay_at_home(heads: int, q_home: np.ndarray, k_home: np.ndarray, columns: int) -> tuple[np.ndarray, np.ndarray]:
    """Ulysses, Ring and USP as they are: heads in equal runs, blocks where they live. Arguments as for `whole`."""
    return whole(contiguous_heads(heads, columns), q_home, k_home, columns)
