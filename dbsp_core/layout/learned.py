"""Sequence layout "learned": profiles of masks, and a distribution of blocks that makes them even."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from dbsp_core.masks.block_mask import BlockMask
from dbsp_core.masks.grid import BlockAxis, BlockGrid

__all__ = ["MaskProfile", "balanced_layout"]

MAX_SWAPS = 4096  # not reached in practice: the loop ends when no swap helps


def balanced_layout(profiles: np.ndarray, parts: int) -> np.ndarray:
    """Distributes blocks to parts of equal size (up to one block), so that every profile is even over the parts.

    `profiles` is float[n, d], the weight of each block in d profiles; the result is int64[n], the part of each block.
    """
    mean = profiles.mean(axis=0)
    weight = profiles / np.where(mean > 0, mean, 1)
    part = np.empty(len(weight), dtype=np.int64)
    load = np.zeros((parts, weight.shape[1]))
    # 1. Rounds of `parts` blocks, heaviest rounds first: the heavier a block, the less its part has so far.
    order = np.argsort(-weight.sum(axis=1), kind="stable")
    for first in range(0, len(order), parts):
        round_ = order[first : first + parts]
        lightest = np.argsort(load.sum(axis=1), kind="stable")[: len(round_)]
        part[round_] = lightest
        load[lightest] += weight[round_]
    # 2. Swaps of blocks between the fullest and the emptiest part, as long as they lower the squared loads.
    for _ in range(MAX_SWAPS):
        if not _swap(weight, part, load):
            break
    return part


def _swap(weight: np.ndarray, part: np.ndarray, load: np.ndarray) -> bool:
    """Makes the best swap between the parts that are furthest apart in some profile; returns whether one helps."""
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


@dataclass(frozen=True, eq=False, repr=False)
class MaskProfile:
    """Work per token, summed over many masks; float64[tokens] each, by canonical position.

    It is the number of dense blocks of the token's query block, and of its key block, over the block's tokens.
    """

    queries: np.ndarray
    keys: np.ndarray

    @classmethod
    def of(cls, masks: Iterable[BlockMask]) -> MaskProfile:
        """The profile of masks of the same tokens."""
        queries: np.ndarray | float = 0.0
        keys: np.ndarray | float = 0.0
        for mask in masks:
            queries = queries + _per_token(mask.grid.q_axis, mask.counts.rows, mask.grid)
            keys = keys + _per_token(mask.grid.k_axis, mask.counts.columns, mask.grid)
        return cls(np.asarray(queries), np.asarray(keys))


def _per_token(axis: BlockAxis, counts: np.ndarray, grid: BlockGrid) -> np.ndarray:
    """float64[tokens]: counts of blocks, int64[H, n], divided among their tokens."""
    tokens = np.zeros(grid.tokens)
    for order, heads in grid.order_groups(len(counts)):
        tokens[grid.token_permutation(order)] += (counts[heads].sum(axis=0) / axis.lengths)[axis.block_of]
    return tokens
