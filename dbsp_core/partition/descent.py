"""Moves and swaps of rows between two ranks, and which of many lower Φ. numpy alone.

Φ = Σ over periods and ranks of (work − mean of the period)². Taking c from the periods of rank a and adding d to those
of rank b changes P · Φ by 2·(d · deviation of b − c · deviation of a) + P · (|c|² + |d|²) − |d − c|², where deviation
is P · work − the period's sum over ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import mul

import numpy as np

__all__ = ["Moves", "pair_up"]


@dataclass(frozen=True, eq=False)
class Moves:
    """Row `first` goes from rank `source` to rank `target`, and row `second`, if there is one, the other way.

    first, source, target: int64[k];  second: int64[k] or None
    out, into: int64[k, y], what the periods of source lose and those of target gain, in all
    """

    first: np.ndarray
    second: np.ndarray | None
    source: np.ndarray
    target: np.ndarray
    out: np.ndarray
    into: np.ndarray

    def take(self, which: np.ndarray | list[int]) -> Moves:
        second = None if self.second is None else self.second[which]
        return Moves(
            self.first[which], second, self.source[which], self.target[which], self.out[which], self.into[which]
        )

    def rows(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(row, rank it leaves, rank it joins) of every single row, int64 each."""
        if self.second is None:
            return self.first, self.source, self.target
        return (
            np.concatenate([self.first, self.second]),
            np.concatenate([self.source, self.target]),
            np.concatenate([self.target, self.source]),
        )

    def change(self, deviation: np.ndarray) -> np.ndarray:
        """int64[k]: by how much each alone changes P · Φ. deviation: int64[P, y]"""
        slope = (self.into * deviation[self.target] - self.out * deviation[self.source]).sum(axis=1)
        return 2 * slope + self._square(len(deviation))

    def _square(self, world: int) -> np.ndarray:
        return (world * (self.out**2 + self.into**2) - (self.into - self.out) ** 2).sum(axis=1)

    def lowering(self, deviation: list[list[int]]) -> list[int]:
        """Those that lower Φ after those made before them, tried in turn. deviation: [P][y], changed as they are made.

        Plain lists: numpy is slower on a few numbers at a time.
        """
        world = len(deviation)
        drift = [0] * len(deviation[0])  # what the periods' sums have grown by
        kept = []
        each = zip(
            self.source.tolist(),
            self.target.tolist(),
            self.out.tolist(),
            self.into.tolist(),
            (self.into - self.out).tolist(),
            self._square(world).tolist(),
            strict=True,
        )
        for move, (a, b, out, into, change, square) in enumerate(each):
            slope = sum(map(mul, into, deviation[b])) - sum(map(mul, out, deviation[a])) - sum(map(mul, change, drift))
            if 2 * slope + square < 0:
                deviation[a] = [old - world * c for old, c in zip(deviation[a], out, strict=True)]
                deviation[b] = [old + world * c for old, c in zip(deviation[b], into, strict=True)]
                drift = [old + c for old, c in zip(drift, change, strict=True)]
                kept.append(move)
        return kept


def pair_up(moves: Moves, gain: np.ndarray) -> Moves:
    """Swaps: the best move from a to b with the best from b to a, the second best with the second best, and so on.

    Two rows that change places change ranks by their difference, where one changes them by a row.
    moves: without second rows; each rank exchanges with one other alone.  gain: [k], larger is better
    """
    forth = moves.source < moves.target
    code = []
    for way in (forth, ~forth):
        some = np.flatnonzero(way)
        low = np.minimum(moves.source[some], moves.target[some])  # names the pair of ranks: each rank has one partner
        order = np.lexsort((-gain[some], low))
        place = np.arange(len(some)) - np.searchsorted(low[order], low[order])
        code.append((some[order], low[order] * len(gain) + place))
    (there, there_code), (back, back_code) = code
    _, i, j = np.intersect1d(there_code, back_code, assume_unique=True, return_indices=True)
    one, two = moves.take(there[i]), moves.take(back[j])
    return Moves(one.first, two.first, one.source, one.target, one.out - two.into, one.into - two.out)
