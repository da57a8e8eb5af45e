"""Which ring rank each block should live on, from profiles summed over heads, layers and steps. numpy alone."""

from __future__ import annotations

import numpy as np

__all__ = ["balanced_layout"]

MAX_SWAPS = 4096  # a safety net: the loop ends by itself when no swap helps


def balanced_layout(profiles: np.ndarray, parts: int) -> np.ndarray:
    """Deals blocks to parts, as many to each (up to one), so that every profile is even over the parts.

    profiles: float[n, d], what each block weighs in each of d profiles (work as queries, work as keys)
    returns:  int64[n], the part of each block

    Blocks go out in rounds of `parts`, heaviest rounds first, the heavier of a round to the part with less so far;
    then pairs of blocks of the fullest and the emptiest part are swapped while that lowers the squared loads.
    """
    mean = profiles.mean(axis=0)
    weight = profiles / np.where(mean > 0, mean, 1)
    part = np.empty(len(weight), dtype=np.int64)
    load = np.zeros((parts, weight.shape[1]))
    order = np.argsort(-weight.sum(axis=1), kind="stable")
    for first in range(0, len(order), parts):
        round_ = order[first : first + parts]
        lightest = np.argsort(load.sum(axis=1), kind="stable")[: len(round_)]
        part[round_] = lightest
        load[lightest] += weight[round_]
    for _ in range(MAX_SWAPS):
        if not _swap(weight, part, load):
            break
    return part


def _swap(weight: np.ndarray, part: np.ndarray, load: np.ndarray) -> bool:
    """Makes the best swap between the parts that are furthest apart in some profile. returns: whether it helped."""
    spread = np.ptp(load, axis=0)
    profile = int(spread.argmax())
    full, empty = int(load[:, profile].argmax()), int(load[:, profile].argmin())
    mine, theirs = np.flatnonzero(part == full), np.flatnonzero(part == empty)
    if not len(mine) or not len(theirs):
        return False
    # Moving δ from full to empty changes the sum of squares by 2·δ·(δ − gap), profile by profile.
    delta = weight[mine][:, None] - weight[theirs][None]
    gain = (2 * delta * (delta - (load[full] - load[empty]))).sum(axis=2)
    best = int(gain.argmin())
    if gain.flat[best] >= -1e-12:
        return False
    a, b = mine[best // len(theirs)], theirs[best % len(theirs)]
    load[full] += weight[b] - weight[a]
    load[empty] += weight[a] - weight[b]
    part[a], part[b] = empty, full
    return True
