"""Head-level partitioning (paper §4.2.1, Alg. 1 lines 4–13). numpy alone."""

from __future__ import annotations

import numpy as np

__all__ = ["greedy_heads"]


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
