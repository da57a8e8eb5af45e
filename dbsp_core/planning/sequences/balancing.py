"""Planner "dbsp" for sequences: they stay in the bags they are loaded in, or go where KnapFormer's greedy puts them.

Bags are then evened out by moves and exchanges of single sequences.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from dbsp_core.planning.sequences.bags import BagTopology
from dbsp_core.planning.sequences.knapsack import greedy_bags

__all__ = ["even_bags"]

TOLERANCE = 2000
"""Bags are even when their loads a rank differ by less than the mean / TOLERANCE."""
_NEVER = np.iinfo(np.int64).max
MAX_STEPS = 4096  # a safety net: the loop ends by itself when no step helps


def even_bags(
    cost: np.ndarray, tokens: np.ndarray, loader: np.ndarray, topology: BagTopology, most_tokens: np.ndarray
) -> np.ndarray:
    """Chooses the bag of each sequence, in whole numbers only, so that every rank decides the same.

    Arguments, result and errors are those of `greedy_bags`.
    """
    bags = len(topology.sizes)
    # 1. From where sequences are loaded, while a few steps do: little is moved then.
    home = _Bags(topology.bag_of_rank[loader], cost, tokens, topology, most_tokens)
    if (home.held <= most_tokens).all() and all(
        home.even_out(slice(first, first + bags), 4 * bags) for first in range(0, len(topology.ranks), bags)
    ):
        return home.bag
    # 2. Otherwise from the greedy's bags; of one size, they are interchangeable.
    found = _Bags(greedy_bags(cost, tokens, loader, topology, most_tokens), cost, tokens, topology, most_tokens)
    for first in range(0, len(topology.ranks), bags):
        found.even_out(slice(first, first + bags), MAX_STEPS)
    return _nearest_home(found.bag, tokens, loader, topology)


@dataclass(eq=False)
class _Bags:
    """The bag of each sequence, and what follows from it; `even_out` changes them."""

    bag: np.ndarray
    cost: np.ndarray
    tokens: np.ndarray
    topology: BagTopology
    most_tokens: np.ndarray
    weight: np.ndarray = field(init=False)
    length: np.ndarray = field(init=False)
    load: np.ndarray = field(init=False)
    held: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self.weight, self.length = np.append(self.cost, 0), np.append(self.tokens, 0)  # the last is that of nothing
        self.load, self.held = np.zeros_like(self.most_tokens), np.zeros_like(self.most_tokens)
        np.add.at(self.load, self.bag, self.cost)
        np.add.at(self.held, self.bag, self.tokens)

    def even_out(self, unit: slice, steps: int) -> bool:
        """Moves and exchanges sequences between a unit's bags; returns whether the bags became even.

        A step takes the fullest and the emptiest bag (by load a rank), or the next emptiest where these two cannot
        come closer. It ends when the fullest can give nothing to any: all ranks wait for that bag, whatever the
        others do.
        """
        ranks = self.topology.ranks[unit]
        share = self.topology.multiple // ranks
        even = int(self.load[unit].sum()) * self.topology.multiple // (self.topology.unit * TOLERANCE)
        for _ in range(steps):
            per_rank = self.load[unit] * share
            if int(per_rank.max() - per_rank.min()) <= even:
                return True
            *others, full = (unit.start + np.argsort(per_rank, kind="stable")).tolist()
            if not any(self._exchange(full, other) for other in others):
                return False
        return False

    def _exchange(self, full: int, empty: int) -> bool:
        """Makes the best exchange of two bags' sequences, one of which may be none; returns whether one helps."""
        # 1. What moves: a sequence of the full bag, or none, against one of the empty bag, or none (index −1).
        mine, theirs = (np.append(np.flatnonzero(self.bag == bag), -1) for bag in (full, empty))
        delta = self.weight[mine][:, None] - self.weight[theirs]
        longer = self.length[mine][:, None] - self.length[theirs]
        # 2. Moving δ makes loads a rank equal where δ·(b + b') = b'·load − b·load'. Best is what comes closest, if it
        # leaves neither bag as full as the full one was.
        ranks = self.topology.ranks[[full, empty]].tolist()
        gap = int(self.load[full]) * ranks[1] - int(self.load[empty]) * ranks[0]
        left = np.abs(delta * sum(ranks) - gap)
        left[(delta <= 0) | (delta * ranks[0] >= gap)] = _NEVER
        room = self.most_tokens[[full, empty]] - self.held[[full, empty]]
        if int(room.min()) < int(self.length.max()):
            left[(longer > room[1]) | (-longer > room[0])] = _NEVER
        best = int(left.argmin())
        if int(left.flat[best]) == _NEVER:
            return False
        # 3. The exchange; what is set at −1 belongs to nothing.
        a, b = int(mine[best // len(theirs)]), int(theirs[best % len(theirs)])
        if a >= 0:
            self.bag[a] = empty
        if b >= 0:
            self.bag[b] = full
        self.load[[full, empty]] += np.array([-1, 1]) * delta.flat[best]
        self.held[[full, empty]] += np.array([-1, 1]) * longer.flat[best]
        return True


def _nearest_home(bag: np.ndarray, tokens: np.ndarray, loader: np.ndarray, topology: BagTopology) -> np.ndarray:
    """Renames bags: each takes the place, among bags of its size and unit, where most of its tokens are loaded."""
    count = len(topology.ranks)
    kind = (np.arange(count) // len(topology.sizes)) * topology.unit + topology.ranks  # bags alike: of unit and size
    common = np.zeros((count, count), dtype=np.int64)
    np.add.at(common, (bag, topology.bag_of_rank[loader]), tokens)
    common[kind[:, None] != kind] = 0
    place, taken = np.full(count, -1), np.zeros(count, dtype=bool)
    # 1. Pairs with something in common, most first.
    pairs = np.flatnonzero(common)
    for pair in pairs[np.argsort(-common.ravel()[pairs], kind="stable")].tolist():
        one, there = divmod(pair, count)
        if place[one] < 0 and not taken[there]:
            place[one], taken[there] = there, True
    # 2. The rest in order.
    for one in np.flatnonzero(place < 0).tolist():
        there = int(np.flatnonzero((kind == kind[one]) & ~taken)[0])
        place[one], taken[there] = there, True
    found: np.ndarray = place[bag]
    return found
