"""What sequence parallelism does without balancing: heads in equal runs, blocks where they are. numpy alone."""

from __future__ import annotations

import numpy as np

__all__ = [
    "balanced_majority_rank",
    "biased_greedy",
    "contiguous_assignment",
    "contiguous_heads",
    "greedy_heads",
    "majority_rank",
    "snake_heads",
    "whole",
]


def contiguous_heads(heads: int, columns: int) -> np.ndarray:
    """Heads in order, in runs as equal as they come (Ulysses). returns: int64[H], the column of each head."""
    return np.arange(heads, dtype=np.int64) * columns // heads


def snake_heads(work: np.ndarray, columns: int) -> np.ndarray:
    """Heads by falling work, dealt out to and fro: 0 1 2 2 1 0 0 1 2 …

    work: int[H], dense blocks per head;  returns: int64[H], the column of each head
    """
    turn, place = np.divmod(np.arange(len(work)), columns)
    column = np.empty(len(work), dtype=np.int64)
    column[np.argsort(-work, kind="stable")] = np.where(turn % 2 == 0, place, columns - 1 - place)
    return column


def majority_rank(tokens_by_part: np.ndarray) -> np.ndarray:
    """Each block stays with the part that holds most of its tokens; ties go to the lower index (Ring).

    tokens_by_part: int[n, parts];  returns: int64[n]
    """
    return tokens_by_part.argmax(axis=1).astype(np.int64)


def balanced_majority_rank(tokens_by_part: np.ndarray) -> np.ndarray:
    """As `majority_rank`, but no part gets more than its even share of blocks, rounded up.

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


def contiguous_assignment(
    heads: int, q_home: np.ndarray, k_home: np.ndarray, columns: int
) -> tuple[np.ndarray, np.ndarray]:
    """Ulysses, Ring and USP as they are: heads in equal runs, blocks where they live. Arguments as for `whole`."""
    return whole(contiguous_heads(heads, columns), q_home, k_home, columns)


def biased_greedy(work: np.ndarray, parts: int, initial: np.ndarray, reward: float) -> np.ndarray:
    """Largest block first, each to the part with the least work so far, its initial part favoured.

    The load of a block's initial part counts `reward` · (the block's own work) less: §4.2.2 multiplies R_b by the
    block's count, where Alg. 1 prints a constant. Ties go to the lower index. reward 0 is the unbiased greedy. A block
    without work stays where it is: to move it would cost bytes and gain nothing.

    work:    int[n], dense blocks that each block takes part in, summed over heads
    initial: int[n], the part that holds each block before the exchange
    returns: int64[n], the part of each block
    """
    load = [0] * parts
    part = np.empty(len(work), dtype=np.int64)
    for block in np.argsort(-work, kind="stable"):
        own = int(work[block])
        home = int(initial[block])
        best = home if own == 0 else min(range(parts), key=lambda p: load[p] - (reward * own if p == home else 0))
        part[block] = best
        load[best] += own
    return part


def greedy_heads(work: np.ndarray, columns: int, cap: int | None = None) -> np.ndarray:
    """Largest head first, each to the Ulysses column with the least work so far; ties go to the lower index.

    work: int[H], dense blocks per head
    cap:  most heads a column may take, or None for Alg. 1 as printed
    returns: int64[H], the column of each head
    """
    if cap is not None and cap * columns < len(work):
        raise ValueError(
            f"{len(work)} heads do not fit {columns} columns of at most {cap}; use cap ≥ {-(-len(work) // columns)}"
        )
    load = [0] * columns
    count = [0] * columns
    column = np.empty(len(work), dtype=np.int64)
    for head in np.argsort(-work, kind="stable"):
        open_columns = [c for c in range(columns) if cap is None or count[c] < cap]
        best = min(open_columns, key=load.__getitem__)
        column[head] = best
        load[best] += int(work[head])
        count[best] += 1
    return column
