"""KnapFormer's greedy: sequences to bags, heaviest first, each to the emptiest with room (§3.3, first pass)."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

import numpy as np

from dbsp_core.planning.sequences.bags import BagTopology
from dbsp_core.utils.errors import UserError

__all__ = ["greedy_bags"]

_Entry = tuple[int, int]
"""(load, bag of the unit)"""


def greedy_bags(
    cost: np.ndarray, tokens: np.ndarray, loader: np.ndarray, topology: BagTopology, most_tokens: np.ndarray
) -> np.ndarray:
    """Chooses the bag of each sequence, in whole numbers only, so that every rank decides the same.

    Where no bag has room left the paper says nothing. Its published program then looks among the bags whose whole
    capacity would do, else among the largest ones; so does this.

    Args:
        cost: int64[n].
        tokens: int64[n].
        loader: int64[n], the rank that loads each sequence.
        most_tokens: int64[bags], what each bag can hold.

    Returns:
        int64[n].

    Raises:
        UserError: A sequence no longer fits into any bag of its unit.
    """
    bag = np.empty(len(cost), dtype=np.int64)
    unit_of = loader // topology.unit
    for unit in range(topology.units):
        mine = np.flatnonzero(unit_of == unit)
        mine = mine[np.argsort(-cost[mine], kind="stable")]
        first = unit * len(topology.sizes)
        room = most_tokens[first : first + len(topology.sizes)].tolist()
        chosen = _Unit(topology, room, int(cost[mine].sum()))
        bag[mine] = [first + chosen.take(*one) for one in zip(cost[mine].tolist(), tokens[mine].tolist(), strict=True)]
    return bag


class _Unit:
    """The bags of a unit. Of bags of one size only the emptiest is looked at: it has the most room left."""

    def __init__(self, topology: BagTopology, room: list[int], total: int) -> None:
        self.topology, self.room, self.total = topology, room, total
        self.by_size = {
            size: [(0, bag) for bag, own in enumerate(topology.sizes) if own == size] for size in set(topology.sizes)
        }

    def take(self, weight: int, length: int) -> int:
        """Puts a sequence into a bag, and says which."""
        emptiest = dict(self._emptiest(length))
        if not emptiest:
            raise UserError(
                f"a sequence of {length:,} tokens does not fit beside those before it in the bags of "
                f"{self.topology}: at most {max(self.room):,} tokens are left in one; allow more tokens a rank, or "
                "use more ranks"
            )
        sizes = [size for size, (load, _) in emptiest.items() if self._within(load + weight, size)]
        sizes = sizes or [size for size in emptiest if self._within(weight, size)] or [max(emptiest)]
        multiple = self.topology.multiple
        size = min(sizes, key=lambda size: (emptiest[size][0] * (multiple // size), emptiest[size][1]))
        load, bag = emptiest[size]
        self.by_size[size].remove((load, bag))
        self.by_size[size].append((load + weight, bag))
        heapq.heapify(self.by_size[size])
        self.room[bag] -= length
        return bag

    def _within(self, load: int, size: int) -> bool:
        """True where a bag's capacity, its ranks' share of all cost, is at least this load."""
        return load * self.topology.unit <= size * self.total

    def _emptiest(self, length: int) -> Iterator[tuple[int, _Entry]]:
        """Yields, for each size of bag, the emptiest bag that has room for this many tokens."""
        for size, bags in self.by_size.items():
            fits = (entry for entry in bags[:1] if self.room[entry[1]] >= length)
            found = next(fits, None) or min((e for e in bags if self.room[e[1]] >= length), default=None)
            if found is not None:
                yield size, found
