"""Block-level partitioning (paper §4.2.2, Alg. 1 lines 14–33). numpy alone."""

from __future__ import annotations

import numpy as np

__all__ = ["biased_greedy"]


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
