"""What grows in a series of measurements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from scripts.checks.stress.soak.census import IN_USE, RESIDENT


def _second_half(series: Sequence[Mapping[str, float]]) -> Sequence[Mapping[str, float]]:
    """What came after the warm-up."""
    return series[len(series) // 2 :]


def slope(series: Sequence[Mapping[str, float]], name: str) -> float:
    """A straight line's through the second half, by least squares: more each case."""
    values = [one[name] for one in _second_half(series)]
    return float(np.polyfit(np.arange(len(values)), values, 1)[0]) if len(values) > 1 else 0.0


def counts_that_grow(series: Sequence[Mapping[str, float]]) -> list[str]:
    """Of counts, those of which every value in the last third of the second half is above all in its first.

    What goes up and down for good does not.
    """
    half = _second_half(series)
    third = len(half) // 3
    told = []
    for name in half[0]:
        first, last = ([one[name] for one in part] for part in (half[:third], half[-third:]))
        if name not in (RESIDENT, IN_USE) and min(last) > max(first):
            told.append(f"{name}: {max(first):g} at most, then {min(last):g} at least")
    return told
