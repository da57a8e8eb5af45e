"""Selections that are the same on every machine: ties always go to the lower index. numpy alone.

numpy's argsort and argpartition choose among equals as the processor's vector width happens to suit; two ranks on
different processors would make different plans.
"""

from __future__ import annotations

import numpy as np

__all__ = ["largest"]


def largest(values: np.ndarray, count: int) -> np.ndarray:
    """int64[min(count, n)]: places of the largest of `values` (any[n]), largest first."""
    if count < len(values):
        least = np.partition(values, len(values) - count)[len(values) - count]
        above = np.flatnonzero(values > least)
        equal = np.flatnonzero(values == least)[: count - len(above)]
        places = np.concatenate([above, equal])
        places.sort()
    else:
        places = np.arange(len(values))
    return places[np.argsort(-values[places], kind="stable")]
