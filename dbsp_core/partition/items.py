"""Single rows moved between ranks until every cell of Eq. 1 (period × rank) is near its period's mean. numpy alone.

The search lowers Φ = Σ over periods and ranks of (work − mean of the period)², a smooth stand-in for Σ_p max_g. Each
round scores a fresh sample of rows against every rank that may own them, takes the best few, and keeps the prefix of
them that is best together. Only rows that pay are moved, so few are.

Every number that decides is an integer, or a float64 that holds one exactly: all ranks decide the same.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import gcd

import numpy as np

from dbsp_core.partition.order import largest
from dbsp_core.partition.periods import Periods

__all__ = ["balance_items"]

SAMPLE = 4096  # rows looked at in a round
BATCH = 96  # most rows moved in a round
ROUNDS = 24
FREE_ROUNDS = 8
IDLE = 3  # rounds without a move that end the search
EXACT = 17  # bits to which deviations are rounded: their squares then add up exactly in float64


def balance_items(
    cells: np.ndarray,
    column: np.ndarray,
    q_home: np.ndarray,
    work: np.ndarray,
    periods: Periods,
    tolerance: float = 1.005,
    move_cost: float = 0.0,
) -> np.ndarray:
    """The owner of every row: its home ring rank and its head's column, but for the few rows that balance the rest.

    Rows of split heads first change column within their ring row, which is free; then rows change ring rank, into
    any column in which their head is needed anyway, until ρ_s is at most `tolerance`.
    cells:     int[H, nq, y], dense blocks of each row by the slot their keys travel in
    column:    int[H, nq], Ulysses column of each row
    q_home:    int[nq], ring rank where each query block lives
    work:      int64[y, P], dense blocks by (period, rank) with every row at its home ring rank
    move_cost: what moving all of Q, K and V would cost, in units of ρ_s
    returns:   int64[H, nq]
    """
    heads, blocks, ring = cells.shape
    needed = np.zeros((heads, periods.ulysses), dtype=bool)
    needed[np.arange(heads)[:, None], column] = True
    total = int(work.sum())
    search = _Search(
        cells=cells.reshape(-1, ring),
        home=np.tile(q_home, heads),
        needed=np.tile(needed, (1, ring)),
        periods=periods,
        price=move_cost * total / (3 * heads * blocks * periods.world),
        owner=(q_home * periods.ulysses + column).reshape(-1),
        work=work,
    )
    split = np.flatnonzero(needed.sum(axis=1) > 1)
    search.run((split[:, None] * blocks + np.arange(blocks)).reshape(-1), True, 0, FREE_ROUNDS)
    search.run(np.arange(heads * blocks), False, int(total * tolerance) // periods.world, ROUNDS)
    return search.owner.reshape(heads, blocks)


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

    @property
    def slowest(self) -> int:
        return int(self.work.max(axis=1).sum())

    def run(self, rows: np.ndarray, free: bool, target: int, rounds: int) -> None:
        """Rounds until the slowest work is at most `target`, then back to the cheapest state on the way.

        rows: int64[k], the rows to look at;  free: whether rows must stay at their ring rank
        """
        stride = _stride(len(rows), len(self.cells) // len(self.needed))
        states = [(float(self.slowest), self.work)]
        self.undo, idle, moved = [], 0, 0
        for turn in range(rounds):
            if self.slowest <= target or idle == min(IDLE, stride) or len(rows) == 0:
                break
            changed = self._round(rows[turn % stride :: stride], free, target)
            idle = 0 if changed else idle + 1
            moved += changed
            if changed:
                states.append((self.slowest + self.price * moved * (not free), self.work))
        best = min(range(len(states)), key=lambda state: states[state][0])
        self.work = states[best][1]
        for chosen, before in reversed(self.undo[best:]):
            self.owner[chosen] = before

    def _round(self, sample: np.ndarray, free: bool, target: int) -> int:
        """Moves the best few rows of `sample` (int64[k]); returns how many."""
        source, cells = self.owner[sample], self.cells[sample]
        target_rank, gain = self._score(sample, source, cells, free)
        best = largest(gain, BATCH)
        best = best[gain[best] > 0]
        if len(best) == 0:
            return 0
        count, work = self._best_prefix(cells[best], source[best], target_rank[best], target)
        chosen = sample[best[:count]]
        if count:
            self.undo.append((chosen, self.owner[chosen]))
            self.owner[chosen] = target_rank[best[:count]]
            self.work = work
        return count

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

    def _best_prefix(
        self, cells: np.ndarray, source: np.ndarray, target: np.ndarray, goal: int
    ) -> tuple[int, np.ndarray]:
        """How many of the moves, in order, to make: the first that reach the goal, else as many as lower Φ most."""
        move = np.arange(len(cells))[:, None]
        change = np.zeros((len(cells) + 1, *self.work.shape), dtype=np.int64)
        change[0] = self.work
        change[move + 1, self.periods.period[:, source].T, source[:, None]] -= cells
        change[move + 1, self.periods.period[:, target].T, target[:, None]] += cells
        work = change.cumsum(axis=0)
        deviation = (self._deviation(work) >> self._shift).astype(np.float64)
        count = int((deviation * deviation).sum(axis=(1, 2)).argmin())
        reached = np.flatnonzero(work[: count + 1].max(axis=2).sum(axis=1) <= goal)
        count = int(reached[0]) if len(reached) else count
        return count, work[count]


def _stride(rows: int, blocks: int) -> int:
    """How far apart sampled rows lie, so that about SAMPLE are, from every head and every place in a stripe."""
    stride = max(1, rows // SAMPLE)
    while stride > 1 and any(gcd(stride, other) > 1 for other in (2, 3, 5, 7, blocks)):
        stride += 1
    return stride
