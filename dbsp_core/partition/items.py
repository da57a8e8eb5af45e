"""Single rows moved between ranks until every cell of Eq. 1 (period × rank) is near its period's mean. numpy alone.

The search lowers Φ = Σ over periods and ranks of (work − mean of the period)², a smooth stand-in for Σ_p max_g. Each
round scores a fresh sample of rows against every rank that may own them, takes the best few, and keeps the prefix of
them that is best together. Only rows that pay are moved, so few are.

Every number that decides is an integer, or a float64 that holds one exactly: all ranks decide the same.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import gcd
from operator import mul

import numpy as np

from dbsp_core.partition.periods import Periods

__all__ = ["balance_items", "trade_rows"]

SAMPLE = 4096  # rows looked at in a round
BATCH = 96  # most rows moved in a round, unless far more work than that is in the wrong place
MEMORY = 1 << 21  # most numbers (moves × periods × ranks) held for a larger batch
ROUNDS = 24
FREE_ROUNDS = 8
PATIENCE, PROGRESS = 6, 0.85  # the search ends when this many rounds leave more than this much of the gap to its goal
EXACT = 17  # bits to which deviations are rounded: their squares then add up exactly in float64


def trade_rows(
    cells: np.ndarray, column: np.ndarray, q_home: np.ndarray, work: np.ndarray, periods: Periods, tolerance: float
) -> tuple[np.ndarray, np.ndarray]:
    """Rows of split heads change column within their ring row, which is free, until ρ_s is at most `tolerance`.

    Arguments as in `balance_items`;  returns: int64[H, nq] column, int64[y, P] work
    """
    search = _Search.start(cells, column, q_home, work, periods)
    split = np.flatnonzero(search.needed[:, : periods.ulysses].sum(axis=1) > 1)
    rows = split[:, None] * len(q_home) + np.arange(len(q_home))
    search.run(rows.reshape(-1), True, int(work.sum() * tolerance) // periods.world, FREE_ROUNDS)
    return search.owner.reshape(column.shape) % periods.ulysses, search.work


def balance_items(
    cells: np.ndarray,
    column: np.ndarray,
    q_home: np.ndarray,
    work: np.ndarray,
    periods: Periods,
    tolerance: float = 1.005,
    move_cost: float = 0.0,
) -> np.ndarray:
    """The owner of every row: its home ring rank and its column, but for the few rows that bring ρ_s to `tolerance`.

    A row may go to any ring rank, in any column in which its head is needed anyway.
    cells:     int[H, nq, y], dense blocks of each row by the slot their keys travel in
    column:    int[H, nq], Ulysses column of each row
    q_home:    int[nq], ring rank where each query block lives
    work:      int64[y, P], dense blocks by (period, rank) with every row at its home ring rank
    move_cost: what moving all of Q, K and V would cost, in units of ρ_s
    returns:   int64[H, nq]
    """
    total = int(work.sum())
    price = move_cost * total / (3 * column.size * periods.world)
    search = _Search.start(cells, column, q_home, work, periods, price)
    search.run(np.arange(column.size), False, int(total * tolerance) // periods.world, ROUNDS)
    return search.owner.reshape(column.shape)


@dataclass(eq=False)
class _Search:
    """A local search on owners; `owner` and `work` are its state, all else is given.

    cells: int[n, y], n = H · nq rows;  home: int[n], ring rank;  needed: bool[H, P], ranks whose column has the head
    price: slowest work (Σ_p max_g) that moving one row must save
    owner: int64[n];  work: int64[y, P] by (period, rank)
    """

    cells: np.ndarray
    home: np.ndarray
    needed: np.ndarray
    periods: Periods
    price: float
    owner: np.ndarray
    work: np.ndarray
    undo: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)

    @classmethod
    def start(
        cls,
        cells: np.ndarray,
        column: np.ndarray,
        q_home: np.ndarray,
        work: np.ndarray,
        periods: Periods,
        price: float = 0.0,
    ) -> _Search:
        """Every row at its home ring rank, in its column."""
        heads, _, ring = cells.shape
        needed = np.zeros((heads, periods.ulysses), dtype=bool)
        needed[np.arange(heads)[:, None], column] = True
        owner = (q_home * periods.ulysses + column).reshape(-1)
        home = np.tile(q_home, heads)
        return cls(cells.reshape(-1, ring), home, np.tile(needed, (1, ring)), periods, price, owner, work)

    @property
    def slowest(self) -> int:
        return int(self.work.max(axis=1).sum())

    def run(self, rows: np.ndarray, free: bool, goal: int, rounds: int) -> None:
        """Rounds until the slowest work is at most `goal` or gets no closer; then back to the cheapest state seen.

        rows: int64[k], the rows to look at;  free: whether rows must stay at their ring rank
        """
        over = np.maximum(self._deviation(self.work), 0).sum() // self.periods.world
        batch = int(over * len(self.cells) // max(1, self.work.sum())) // 2
        batch = max(BATCH, min(batch, MEMORY // self.work.size))
        stride = _stride(len(rows), max(SAMPLE, 8 * batch), len(self.cells) // len(self.needed))
        states = [(float(self.slowest), self.work)]
        self.undo, moved, gaps = [], 0, []
        for turn in range(rounds if len(rows) else 0):
            gaps.append(self.slowest - goal)
            if gaps[-1] <= 0 or (turn >= PATIENCE and gaps[-1] > PROGRESS * gaps[-1 - PATIENCE]):
                break
            changed = self._round(rows[turn % stride :: stride], batch, free, goal)
            if changed:
                moved += changed
                states.append((self.slowest + self.price * moved * (not free), self.work))
            elif turn + 1 >= stride:
                break
        best = min(range(len(states)), key=lambda state: states[state][0])
        self.work = states[best][1]
        for chosen, before in reversed(self.undo[best:]):
            self.owner[chosen] = before

    def _round(self, sample: np.ndarray, batch: int, free: bool, goal: int) -> int:
        """Moves at most `batch` rows of `sample` (int64[k]), those that lower Φ most; returns how many."""
        source, cells = self.owner[sample], self.cells[sample]
        target, gain = self._score(sample, source, cells, free)
        best = np.argsort(-gain, kind="stable")[:batch]  # stable: ties go to the lower index on any processor
        best = best[gain[best] > 0]
        if len(best) == 0:
            return 0
        kept, self.work = self._accept(cells[best].astype(np.int64), source[best], target[best], goal)
        best = best[kept]
        self.undo.append((sample[best], source[best]))
        self.owner[sample[best]] = target[best]
        return len(best)

    def _deviation(self, work: np.ndarray) -> np.ndarray:
        """P · work minus the period's sum over ranks, of the same shape [..., y, P]."""
        return work * self.periods.world - work.sum(axis=-1, keepdims=True)

    @property
    def _shift(self) -> int:
        """Bits of the deviation to drop so that `EXACT` are left."""
        return max(0, int(np.abs(self._deviation(self.work)).max()).bit_length() - EXACT)

    def _score(
        self, sample: np.ndarray, source: np.ndarray, cells: np.ndarray, free: bool
    ) -> tuple[np.ndarray, np.ndarray]:
        """For each row the rank to which moving it lowers Φ most, and by how much (scaled); both [k].

        Moving cells c from rank a to b changes Φ by 2·c·(deviation of b − deviation of a) + 2·|c|².
        """
        world, every = self.periods.world, np.arange(len(sample))
        deviation = self._deviation(self.work) >> self._shift
        toward = deviation[self.periods.period, np.arange(world)].astype(np.float64)  # [slot, rank]
        floats = cells.astype(np.float64)
        cost = floats @ toward
        here = cost[every, source]
        if self.periods.ulysses > 1:
            cost[~self.needed[sample // (len(self.cells) // len(self.needed))]] = np.inf
        if free:
            cost[np.arange(world) // self.periods.ulysses != self.home[sample, None]] = np.inf
        cost[every, source] = np.inf
        target = cost.argmin(axis=1)
        square = np.einsum("ks,ks->k", floats, floats) * (world / (1 << self._shift))
        return target, here - cost[every, target] - square

    def _accept(
        self, cells: np.ndarray, source: np.ndarray, target: np.ndarray, goal: int
    ) -> tuple[list[int], np.ndarray]:
        """Which of the moves to make, and the work after them: each that still lowers Φ, until the goal is reached."""
        slot, ulysses = self.periods.slot, self.periods.ulysses
        leaves = np.take_along_axis(cells, slot[source // ulysses], axis=1)
        joins = np.take_along_axis(cells, slot[target // ulysses], axis=1)
        kept = _lowering(self._deviation(self.work).T.tolist(), leaves, joins, source.tolist(), target.tolist())
        step, period = np.arange(1, len(kept) + 1)[:, None], np.arange(len(self.work))
        change = np.zeros((len(kept) + 1, *self.work.shape), dtype=np.int64)
        change[0] = self.work
        change[step, period, source[kept, None]] -= leaves[kept]
        change[step, period, target[kept, None]] += joins[kept]
        work = change.cumsum(axis=0)
        reached = np.flatnonzero(work.max(axis=2).sum(axis=1) <= goal)
        count = int(reached[0]) if len(reached) else len(kept)
        return kept[:count], work[count]


def _lowering(
    deviation: list[list[int]], leaves: np.ndarray, joins: np.ndarray, source: list[int], target: list[int]
) -> list[int]:
    """The moves, tried in turn, that lower Φ after those before them.

    Moving a row that adds c to the periods of rank a and d to those of rank b changes P · Φ by
    2·(d · deviation of b − c · deviation of a) + P · (|c|² + |d|²) − |d − c|². Plain lists: numpy is slower on a few
    numbers at a time.
    deviation: [P][y], P · work − the period's sum, changed as moves are made;  leaves, joins: int64[k, y], c and d
    """
    world = len(deviation)
    shift = joins - leaves
    fixed = (world * (leaves**2 + joins**2) - shift**2).sum(axis=1).tolist()
    drift = [0] * len(deviation[0])  # what the periods' sums have grown by
    kept = []
    moves = zip(leaves.tolist(), joins.tolist(), shift.tolist(), source, target, fixed, strict=True)
    for move, (out, into, change, a, b, square) in enumerate(moves):
        slope = sum(map(mul, into, deviation[b])) - sum(map(mul, out, deviation[a])) - sum(map(mul, change, drift))
        if 2 * slope + square < 0:
            deviation[a] = [old - world * c for old, c in zip(deviation[a], out, strict=True)]
            deviation[b] = [old + world * c for old, c in zip(deviation[b], into, strict=True)]
            drift = [old + c for old, c in zip(drift, change, strict=True)]
            kept.append(move)
    return kept


def _stride(rows: int, sample: int, blocks: int) -> int:
    """How far apart sampled rows lie, so that about `sample` are, from every head and every place in a stripe."""
    stride = max(1, rows // sample)
    while stride > 1 and any(gcd(stride, other) > 1 for other in (2, 3, 5, 7, blocks)):
        stride += 1
    return stride
