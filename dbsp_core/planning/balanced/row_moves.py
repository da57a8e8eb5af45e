"""Single rows moved until each rank's work in each ring step (Eq. 1) is near that step's mean. Only numpy.

The search lowers Φ = Σ over ring steps and ranks of (work − mean of the ring step)², a smooth stand-in for Σ_p max_g.
Each round scores a fresh sample of rows against every rank that may own them, takes the best few, and keeps the prefix
of them that is best together. Only rows that pay are moved, so few are.

Every number that decides is an integer, or a float64 that holds one exactly: all ranks decide the same.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import gcd
from operator import mul

import numpy as np

from dbsp_core.planning.balanced.work import RingSchedule

__all__ = ["Moves", "move_rows", "pair_up", "trade_rows"]


@dataclass(frozen=True, eq=False)
class Moves:
    """Moves of row `first` from rank `source` to rank `target`, and of row `second`, if there is one, back.

    Attributes:
        first, source, target: int64[k].
        second: int64[k], or None.
        out: int64[k, y], what each ring step of `source` loses in all.
        into: int64[k, y], what each ring step of `target` gains in all.
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
        """int64[k]: by how much each move alone changes P · Φ, for deviations int64[P, y]."""
        slope = (self.into * deviation[self.target] - self.out * deviation[self.source]).sum(axis=1)
        return 2 * slope + self._square(len(deviation))

    def _square(self, world: int) -> np.ndarray:
        return (world * (self.out**2 + self.into**2) - (self.into - self.out) ** 2).sum(axis=1)

    def lowering(self, deviation: list[list[int]]) -> list[int]:
        """Tries the moves in turn, and returns the numbers of those that lower Φ after those made before them.

        Plain lists: numpy is slower on a few numbers at a time.

        Args:
            deviation: [P][y], changed with each move that is made.
        """
        world = len(deviation)
        drift = [0] * len(deviation[0])  # what the ring steps' sums have grown by
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
    """Makes swaps of moves: the best from a to b with the best from b to a, the second best with the second best, …

    Two rows that change places change their ranks by their difference, where one row changes them by a whole row.

    Args:
        moves: Without second rows; each rank exchanges with only one other.
        gain: [k], larger is better.
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


SAMPLE = 4096  # rows looked at in a round
BATCH = 96  # most rows moved in a round, unless far more work than that is in the wrong place
MEMORY = 1 << 21  # most numbers (moves × ring steps × ranks) held for a larger batch
ROUNDS = 24
FREE_ROUNDS = 8
PATIENCE, PROGRESS = 6, 0.85  # the search ends when this many rounds leave more than this much of the gap to its goal
SLOW = 0.9  # after a round that leaves more of the gap than this, moves take turns with swaps
EXACT = 17  # bits to which deviations are rounded: their squares then add up exactly in float64


def trade_rows(
    work_by_slot: np.ndarray,
    ulysses_rank: np.ndarray,
    q_home: np.ndarray,
    work: np.ndarray,
    schedule: RingSchedule,
    target_rho: float,
) -> tuple[np.ndarray, np.ndarray]:
    """Moves rows of split heads between the Ulysses ranks of a ring row, which is free, until ρ_s is `target_rho`.

    Arguments are those of `move_rows`.

    Returns:
        int64[H, nq], the Ulysses rank of each row, and int64[y, P], the work then.
    """
    search = _Search.start(work_by_slot, ulysses_rank, q_home, work, schedule)
    split = np.flatnonzero(search.needed[:, : schedule.ulysses].sum(axis=1) > 1)
    rows = split[:, None] * ulysses_rank.shape[1] + np.arange(ulysses_rank.shape[1])
    search.run(rows.reshape(-1), True, int(work.sum() * target_rho) // schedule.world, FREE_ROUNDS)
    return search.owner.reshape(ulysses_rank.shape) % schedule.ulysses, search.work


def move_rows(
    work_by_slot: np.ndarray,
    ulysses_rank: np.ndarray,
    q_home: np.ndarray,
    work: np.ndarray,
    schedule: RingSchedule,
    target_rho: float = 1.005,
) -> tuple[np.ndarray, np.ndarray]:
    """Leaves rows at their home ring rank and Ulysses rank, but for the few moves that bring ρ_s to `target_rho`.

    A row may go to any ring rank, in any Ulysses rank in which its head is needed anyway.

    Args:
        work_by_slot: int[H, nq, y], dense blocks of each row by the slot that their keys travel in.
        ulysses_rank: int[H, nq], Ulysses rank of each row.
        q_home: int[nq] or int[H, nq], ring rank where each query block lives.
        work: int64[y, P], dense blocks by (ring step, rank) with every row at its home ring rank.

    Returns:
        int64[H, nq], the owner of each row, and int64[y, P], the work then.
    """
    total = int(work.sum())
    search = _Search.start(work_by_slot, ulysses_rank, q_home, work, schedule)
    search.run(np.arange(ulysses_rank.size), False, int(total * target_rho) // schedule.world, ROUNDS)
    return search.owner.reshape(ulysses_rank.shape), search.work


@dataclass(eq=False)
class _Search:
    """A local search on owners; `owner` and `work` are its state.

    Attributes:
        work_by_slot: int[n, y] for n = H · nq rows.
        home: int[n], ring rank.
        needed: bool[H, P], ranks whose Ulysses rank has the head.
        owner: int64[n].
        work: int64[y, P] by (ring step, rank).
    """

    work_by_slot: np.ndarray
    home: np.ndarray
    needed: np.ndarray
    schedule: RingSchedule
    owner: np.ndarray
    work: np.ndarray
    undo: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)

    @classmethod
    def start(
        cls,
        work_by_slot: np.ndarray,
        ulysses_rank: np.ndarray,
        q_home: np.ndarray,
        work: np.ndarray,
        schedule: RingSchedule,
    ) -> _Search:
        """Puts every row at its home ring rank, in its Ulysses rank."""
        heads, _, ring = work_by_slot.shape
        needed = np.zeros((heads, schedule.ulysses), dtype=bool)
        needed[np.arange(heads)[:, None], ulysses_rank] = True
        owner = (q_home * schedule.ulysses + ulysses_rank).reshape(-1)
        home = np.broadcast_to(q_home, ulysses_rank.shape).reshape(-1)
        return cls(work_by_slot.reshape(-1, ring), home, np.tile(needed, (1, ring)), schedule, owner, work)

    @property
    def slowest(self) -> int:
        return int(self.work.max(axis=1).sum())

    def run(self, rows: np.ndarray, free: bool, goal: int, rounds: int) -> None:
        """Makes rounds until the slowest work is at most `goal` or gets no closer; returns to the best state seen.

        Args:
            rows: int64[k], the rows to look at.
            free: Whether rows must stay at their ring rank.
        """
        # 1. How much work is in the wrong place decides how many rows move in a round, and how many are looked at.
        over = np.maximum(self._deviation(self.work), 0).sum() // self.schedule.world
        batch = int(over * len(self.work_by_slot) // max(1, self.work.sum())) // 2
        batch = max(BATCH, min(batch, MEMORY // self.work.size))
        stride = _stride(len(rows), max(SAMPLE, 8 * batch), len(self.work_by_slot) // len(self.needed))
        # 2. Rounds over samples; where moves lose pace, they take turns with swaps.
        states = [(self.slowest, self.work)]
        self.undo, gaps, swaps = [], [], False
        for turn in range(rounds if len(rows) else 0):
            gaps.append(self.slowest - goal)
            if gaps[-1] <= 0 or (turn >= PATIENCE and gaps[-1] > PROGRESS * gaps[-1 - PATIENCE]):
                break
            swaps ^= turn > 0 and gaps[-1] > SLOW * gaps[-2]
            if self._round(rows[turn % stride :: stride], batch, swaps, free, goal):
                states.append((self.slowest, self.work))
            elif turn + 1 >= stride:
                break
        # 3. Back to the state whose slowest ranks have least.
        best = min(range(len(states)), key=lambda state: states[state][0])
        self.work = states[best][1]
        for chosen, before in reversed(self.undo[best:]):
            self.owner[chosen] = before

    def _round(self, sample: np.ndarray, batch: int, swaps: bool, free: bool, goal: int) -> bool:
        """Makes at most `batch` moves, or swaps, of rows in `sample` (int64[k]); returns whether it moved any."""
        # 1. The moves that each lower Φ most.
        deviation = self._deviation(self.work).T
        moves = self._best_swaps(sample, free, batch) if swaps else self._best_moves(sample, free, batch)
        # 2. Those of them that still do after the moves before them.
        moves = moves.take(moves.lowering(deviation.tolist()))
        # 3. As many of these as the goal needs.
        count, self.work = self._until(moves, goal)
        row, leaves, joins = moves.take(np.arange(count)).rows()
        if count:
            self.undo.append((row, leaves))
            self.owner[row] = joins
        return count > 0

    def _best_moves(self, sample: np.ndarray, free: bool, batch: int) -> Moves:
        """Moves of each row to the rank where it lowers Φ most; the `batch` best of them.

        Moving work by slot c from rank a to b changes Φ by 2·c·(deviation of b − deviation of a) + 2·|c|².
        """
        source, work_by_slot = self.owner[sample], self.work_by_slot[sample].astype(np.float64)
        world, every = self.schedule.world, np.arange(len(sample))
        shift, toward = self._toward()
        cost = work_by_slot @ toward
        here = cost[every, source]
        if self.schedule.ulysses > 1:
            cost[~self._needed(sample)] = np.inf
        if free:
            cost[np.arange(world) // self.schedule.ulysses != self.home[sample, None]] = np.inf
        cost[every, source] = np.inf
        target = cost.argmin(axis=1)
        gain = here - cost[every, target] - np.einsum("ks,ks->k", work_by_slot, work_by_slot) * (world / (1 << shift))
        best = np.argsort(-gain, kind="stable")  # stable: ties go to the lower index on any processor
        best = best[: min(batch, int((gain > 0).sum()))]
        return self._moves(sample[best], source[best], target[best])

    def _best_swaps(self, sample: np.ndarray, free: bool, batch: int) -> Moves:
        """Swaps of rows between ranks that differ most, the best of each with the other's best; `batch` at most."""
        _, toward = self._toward()
        target = _partners(toward, self.schedule.ulysses, free)[self.owner[sample]]
        fits = (target >= 0) & self._needed(sample)[np.arange(len(sample)), target]
        sample, target = sample[fits], target[fits]
        source = self.owner[sample]
        gain = (self.work_by_slot[sample] * (toward.T[source] - toward.T[target])).sum(axis=1)
        swaps = pair_up(self._moves(sample, source, target), gain)
        change = swaps.change(self._deviation(self.work).T)
        return swaps.take(np.argsort(change, kind="stable")[: min(batch, int((change < 0).sum()))])

    def _needed(self, sample: np.ndarray) -> np.ndarray:
        """bool[k, P]: ranks whose Ulysses rank has the row's head."""
        return self.needed[sample // (len(self.work_by_slot) // len(self.needed))]

    def _toward(self) -> tuple[int, np.ndarray]:
        """Bits dropped so that `EXACT` are left, and float64[y, P]: deviation by (slot, rank) without those bits."""
        deviation = self._deviation(self.work)
        shift = max(0, int(np.abs(deviation).max()).bit_length() - EXACT)
        return shift, (deviation >> shift)[self.schedule.ring_step, np.arange(self.schedule.world)].astype(np.float64)

    def _moves(self, row: np.ndarray, source: np.ndarray, target: np.ndarray) -> Moves:
        slot, ulysses = self.schedule.slot, self.schedule.ulysses
        work_by_slot = self.work_by_slot[row].astype(np.int64)
        out = np.take_along_axis(work_by_slot, slot[source // ulysses], axis=1)
        into = np.take_along_axis(work_by_slot, slot[target // ulysses], axis=1)
        return Moves(row, None, source, target, out, into)

    def _until(self, moves: Moves, goal: int) -> tuple[int, np.ndarray]:
        """Number of moves that it takes to reach the goal, or all, and the work after them."""
        step, ring_step = np.arange(1, len(moves.first) + 1)[:, None], np.arange(len(self.work))
        change = np.zeros((len(moves.first) + 1, *self.work.shape), dtype=np.int64)
        change[0] = self.work
        change[step, ring_step, moves.source[:, None]] -= moves.out
        change[step, ring_step, moves.target[:, None]] += moves.into
        work = change.cumsum(axis=0)
        reached = np.flatnonzero(work.max(axis=2).sum(axis=1) <= goal)
        count = int(reached[0]) if len(reached) else len(moves.first)
        return count, work[count]

    def _deviation(self, work: np.ndarray) -> np.ndarray:
        """P · work minus the ring step's sum over ranks, of the same shape [..., y, P]."""
        return work * self.schedule.world - work.sum(axis=-1, keepdims=True)


def _partners(toward: np.ndarray, ulysses: int, free: bool) -> np.ndarray:
    """int64[P]: the rank that each rank exchanges rows with, pairs that differ most first; −1 for none.

    Args:
        toward: float64[y, P], deviation by (slot, rank).
        free: Whether partners share a ring row, rather than a Ulysses rank.
    """
    world = toward.shape[1]
    place = np.arange(world) // ulysses if free else np.arange(world) % ulysses
    one, two = np.nonzero(np.triu(place[:, None] == place, k=1))
    partner = np.full(world, -1)
    for pair in np.argsort(-((toward[:, one] - toward[:, two]) ** 2).sum(axis=0), kind="stable"):
        a, b = one[pair], two[pair]
        if partner[a] < 0 and partner[b] < 0:
            partner[a], partner[b] = b, a
    return partner


def _stride(rows: int, sample: int, blocks: int) -> int:
    """Distance of sampled rows, about `sample` in all: one that reaches every head and every place in a stripe."""
    stride = max(1, rows // sample)
    while stride > 1 and any(gcd(stride, other) > 1 for other in (2, 3, 5, 7, blocks)):
        stride += 1
    return stride
