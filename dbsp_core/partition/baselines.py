"""What sequence parallelism does without balancing: heads in equal runs, blocks where they are. numpy alone."""

from __future__ import annotations

import numpy as np

__all__ = ["contiguous_heads", "resident_parts"]


def contiguous_heads(heads: int, columns: int) -> np.ndarray:
    """Heads in order, in runs as equal as they come (Ulysses). returns: int64[H], the column of each head."""
    return np.arange(heads, dtype=np.int64) * columns // heads


def resident_parts(tokens_by_part: np.ndarray) -> np.ndarray:
    """Each block stays with the part that holds most of its tokens; ties go to the lower index (Ring).

    tokens_by_part: int[n, parts];  returns: int64[n]
    """
    return tokens_by_part.argmax(axis=1).astype(np.int64)
