"""KnapFormer's share of each sequence for each rank of its bag: even chunks (§3.3, second pass)."""

from __future__ import annotations

import numpy as np

from dbsp_core.planning.bags import BagTopology
from dbsp_core.planning.sequences import TokenRuns


def chunks(tokens: np.ndarray, bag: np.ndarray, topology: BagTopology) -> TokenRuns:
    """Cuts as KnapFormer does: each sequence in contiguous chunks, as even as possible, one for each rank of its bag.

    Remaining tokens go one each to ranks of the bag, round-robin. `tokens` and `bag` are int64[n].
    """
    sizes = topology.ranks[bag]
    over = tokens % sizes
    # 1. Whose turn it is: the tokens left over by the bag's sequences before this one.
    order = np.argsort(bag, kind="stable")
    before = np.empty_like(over)
    running = np.cumsum(over[order]) - over[order]
    first_of_bag = np.searchsorted(bag[order], bag[order])
    before[order] = running - running[first_of_bag]
    # 2. Chunk k of every sequence.
    sequence = np.repeat(np.arange(len(tokens)), sizes)
    k = np.arange(len(sequence)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    turn = (k - before[sequence]) % sizes[sequence]
    length = tokens[sequence] // sizes[sequence] + (turn < over[sequence])
    start = np.cumsum(length) - length
    start -= np.repeat(np.cumsum(tokens) - tokens, sizes)
    return TokenRuns.sorted(sequence, start, length, topology.first_rank[bag[sequence]] + k)
