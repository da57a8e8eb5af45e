"""What sequence parallelism does without balancing: heads in equal runs, blocks where they are. Only numpy."""

from __future__ import annotations

import numpy as np

__all__ = [
    "balanced_majority_rank",
    "biased_greedy",
    "contiguous_heads",
    "greedy_heads",
    "majority_rank",
    "snake_heads",
]


def contiguous_heads(heads: int, ulysses_degree: int) -> np.ndarray:
    """Heads in order, in runs as equal as they come (Ulysses).

    Returns:
        int64[H], the Ulysses rank of each head.
    """
    return np.arange(heads, dtype=np.int64) * ulysses_degree // heads


def snake_heads(work: np.ndarray, ulysses_degree: int) -> np.ndarray:
    """Heads by falling work, assigned back and forth: 0 1 2 2 1 0 0 1 2 …

    Args:
        work: int[H], dense blocks per head.

    Returns:
        int64[H], the Ulysses rank of each head.
    """
    turn, place = np.divmod(np.arange(len(work)), ulysses_degree)
    ulysses_rank = np.empty(len(work), dtype=np.int64)
    ulysses_rank[np.argsort(-work, kind="stable")] = np.where(turn % 2 == 0, place, ulysses_degree - 1 - place)
    return ulysses_rank


def majority_rank(tokens_by_part: np.ndarray) -> np.ndarray:
    """Each block stays with the part that holds most of its tokens; ties go to the lower index (Ring).

    Args:
        tokens_by_part: int[n, parts].

    Returns:
        int64[n].
    """
    return tokens_by_part.argmax(axis=1).astype(np.int64)


def balanced_majority_rank(tokens_by_part: np.ndarray) -> np.ndarray:
    """Assigns as `majority_rank` does, but no part gets more than its even share of blocks, rounded up.

    For blocks whose tokens lie scattered over all parts: the most tokens would be an accident, and the same for most.
    Blocks with most to lose choose first.

    Args:
        tokens_by_part: int[n, parts].

    Returns:
        int64[n].
    """
    blocks, parts = tokens_by_part.shape
    room = [-(-blocks // parts)] * parts
    preferences = np.argsort(-tokens_by_part, axis=1, kind="stable").tolist()
    part = np.empty(blocks, dtype=np.int64)
    for block in np.argsort(-tokens_by_part.max(axis=1), kind="stable").tolist():
        part[block] = next(preferred for preferred in preferences[block] if room[preferred])
        room[part[block]] -= 1
    return part


def biased_greedy(work: np.ndarray, parts: int, initial: np.ndarray, reward: float) -> np.ndarray:
    """Largest block first, each to the part with the least work so far, its initial part favoured.

    The load of a block's initial part counts `reward` · (the block's own work) less: §4.2.2 multiplies R_b by the
    block's count, where Alg. 1 prints a constant. Ties go to the lower index. reward 0 is the unbiased greedy. A block
    without work stays where it is: to move it would cost bytes and gain nothing.

    Args:
        work: int[n], dense blocks that each block takes part in, summed over heads.
        initial: int[n], the part that holds each block before the exchange.

    Returns:
        int64[n], the part of each block.
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


def greedy_heads(work: np.ndarray, ulysses_degree: int, cap: int | None = None) -> np.ndarray:
    """Largest head first, each to the Ulysses rank with the least work so far; ties go to the lower index.

    Args:
        work: int[H], dense blocks per head.
        cap: Most heads a Ulysses rank may take, or None for Alg. 1 as printed.

    Returns:
        int64[H], the Ulysses rank of each head.
    """
    if cap is not None and cap * ulysses_degree < len(work):
        least = -(-len(work) // ulysses_degree)
        raise ValueError(f"{len(work)} heads do not fit {ulysses_degree} ranks of at most {cap}; use cap ≥ {least}")
    load = [0] * ulysses_degree
    count = [0] * ulysses_degree
    ulysses_rank = np.empty(len(work), dtype=np.int64)
    for head in np.argsort(-work, kind="stable"):
        open_ranks = [c for c in range(ulysses_degree) if cap is None or count[c] < cap]
        best = min(open_ranks, key=load.__getitem__)
        ulysses_rank[head] = best
        load[best] += int(work[head])
        count[best] += 1
    return ulysses_rank
