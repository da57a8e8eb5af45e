"""Rows to ranks until all ranks have nearly the same work, by moving few rows. Only numpy and integers.

No rank waits for another between two chunks of keys, so only the sum of a rank's rows has to be balanced. Anything
that is balanced here is called a row; whole heads are exchanged in the same way (see `planning.heads`).
"""

from __future__ import annotations

import numpy as np

FEW_ROWS = 512
"""Rows with work up to which every exchange of two is tried where giving rows away does not balance ranks."""
EVERY_PAIR = 64
"""Rows up to which exchanges between any two ranks are tried, not only those with the fullest."""
SHARED_ROWS = 14
"""Rows of two ranks up to which every way to share them is tried."""
FEW_GIVEN = 16
"""Rows to give away up to which no swap is tried instead."""


def load_limit(total: int, ranks: int, target_rho: float) -> int:
    """Returns the work of the fullest of `ranks` that is good enough: what `target_rho` allows, at least the mean."""
    return max(-(-total // ranks), int(total * target_rho) // ranks)


def level_rows(work: np.ndarray, rank: np.ndarray, ranks: int, limit: int) -> np.ndarray:
    """Moves rows from the fullest rank to others, few and heavy ones, until none is above `limit` or none helps.

    Args:
        work: int64[n], active blocks of each row.
        rank: int64[n], where each row is.

    Returns:
        int64[n], the rank of each row.
    """
    load = np.bincount(rank, work, ranks).astype(np.int64)
    if load.max() <= limit:
        return rank
    # 1. Rows with work, heaviest first; small numbers are sorted by radix, which is much faster.
    rows = np.flatnonzero(work)
    falling = work.max() - work[rows]
    rows = rows[np.argsort(falling.astype(np.uint16) if work.max() < 1 << 16 else falling, kind="stable")]
    sizes, held_by = work[rows], rank[rows]
    # 2. The fullest rank trades rows with others.
    for _ in range(8 * ranks):
        if load.max() <= limit or not _relieve(sizes, held_by, load, limit):
            break
    # 3. Few rows are exchanged in every way.
    if load.max() > limit and len(rows) <= FEW_ROWS:
        held_by = exchange_rows(sizes, held_by, ranks, limit)
    rank = rank.copy()
    rank[rows] = held_by
    return rank


def _relieve(sizes: np.ndarray, held_by: np.ndarray, load: np.ndarray, limit: int) -> bool:
    """Moves rows from the fullest rank to the emptiest that lowers the fuller of the two; False if none does.

    `held_by` and `load` are changed in place.
    """
    full, mean = int(load.argmax()), int(load.sum()) // len(load)
    goal = (mean + limit) // 2
    ours = np.flatnonzero(held_by == full)
    for other in np.argsort(load, kind="stable").tolist():
        room = int(load[full] - load[other])
        if room <= 1:
            return False
        wanted = min(int(load[full]) - goal, max(mean - int(load[other]), room // 2))
        leaving, coming = rows_to_trade(sizes, ours, np.flatnonzero(held_by == other), wanted)
        change = int(sizes[leaving].sum() - sizes[coming].sum())
        if 0 < change < room:
            held_by[leaving], held_by[coming] = other, full
            load[full] -= change
            load[other] += change
            return True
    return False


def rows_to_trade(
    sizes: np.ndarray, ours: np.ndarray, theirs: np.ndarray, wanted: int
) -> tuple[np.ndarray, np.ndarray]:
    """Chooses rows to give and rows to take whose difference in work is about `wanted`, as few as possible.

    Args:
        sizes: int64[n], falling.
        ours, theirs: Rising indices of `sizes`.

    Returns:
        Some of `ours` and some of `theirs`, int64 each.
    """
    leaving = _fitting(sizes, ours, wanted)
    if 0 < len(leaving) <= FEW_GIVEN or not len(ours) or not len(theirs):
        return leaving, theirs[:0]
    # Or the lightest of ours goes, and several of theirs come for it; or pairs change sides, the fewest that will do.
    trades = [(leaving, theirs[:0]), (ours[-1:], _fitting(sizes, theirs, int(sizes[ours[-1]]) - wanted))]
    trades += [
        _pairs(sizes, ours, theirs, wanted, count) for count in (1, 4, 16) if count <= min(len(ours), len(theirs))
    ]
    miss = [abs(int(sizes[g].sum() - sizes[t].sum()) - wanted) * 8 // max(wanted, 1) for g, t in trades]
    rows = [len(g) + len(t) for g, t in trades]
    return trades[min(range(len(trades)), key=lambda i: (miss[i], rows[i]))]


def _pairs(
    sizes: np.ndarray, ours: np.ndarray, theirs: np.ndarray, wanted: int, count: int
) -> tuple[np.ndarray, np.ndarray]:
    """Chooses `count` rows of either side whose difference in work is about `wanted`; arguments as above."""
    # 1. All but one: our heaviest for the run of theirs that comes closest from below.
    others = count - 1
    leaving, ours = ours[:others], ours[others:]
    total = np.concatenate(([0], sizes[theirs].cumsum()))
    gains = sizes[leaving].sum() - (total[others:] - total[: len(total) - others])
    start = max(0, int(gains.searchsorted(wanted)) - 1)
    taken = theirs[start : start + others]
    theirs = np.concatenate((theirs[:start], theirs[start + others :]))
    # 2. For each other row of ours, the first of theirs that leaves no more than the rest, or the one before it.
    our_sizes, their, rest = sizes[ours], sizes[theirs], wanted - int(gains[start])
    first = (-their).searchsorted(rest - our_sizes).clip(max=len(their) - 1)
    before = (first - 1).clip(min=0)
    first_miss, before_miss = (abs(our_sizes - their[back] - rest) for back in (first, before))
    back = np.where(first_miss <= before_miss, first, before)
    best = int(np.minimum(first_miss, before_miss).argmin())
    return np.append(leaving, ours[best]), np.append(taken, theirs[back[best]])


def _fitting(sizes: np.ndarray, rows: np.ndarray, room: int) -> np.ndarray:
    """Chooses the fewest of `rows`, rising indices of the falling `sizes`, that nearly fill a room and no more."""
    rows = rows[np.searchsorted(-sizes[rows], -room) :]
    if room <= 0 or not len(rows):
        return rows[:0]
    # 1. A run of as few as can, from where on it is not too much.
    total = np.concatenate(([0], sizes[rows].cumsum()))
    count = min(int(np.searchsorted(total, room)), len(rows))
    runs = total[count:] - total[:-count]  # falling
    start = int(np.searchsorted(-runs, -room))
    if start == len(runs):
        return rows[: count - 1]
    # 2. Its first row is exchanged for a heavier one that closes the gap better.
    run = np.arange(start, start + count)
    better = int(np.searchsorted(-sizes[rows[:start]], -(sizes[rows[start]] + room - runs[start])))
    run[0] = min(better, start)
    return rows[run]


def exchange_rows(work: np.ndarray, rank: np.ndarray, ranks: int, limit: int, cap: int | None = None) -> np.ndarray:
    """Exchanges single rows until no rank is above `limit`, or the fullest one cannot be helped.

    A step moves one row, or swaps two, so that loads come closest (by the sum of their squares). Where that does not
    help the fullest rank, its rows and another's are shared in the best of all ways.

    Args:
        work: int64[n], of each row; or of each head.
        rank: int64[n], where each is.
        cap: Most rows of a rank, or None.

    Returns:
        int64[n], the rank of each row.
    """
    rank, load = rank.astype(np.int64), np.bincount(rank, work, ranks).astype(np.int64)
    for _ in range(4 * (ranks + len(work))):
        if load.max() <= limit or not (_swap(work, rank, load, cap) or _share(work, rank, load, cap)):
            break
    return rank


def _swap(work: np.ndarray, rank: np.ndarray, load: np.ndarray, cap: int | None) -> bool:
    """Makes the best move or swap in place; False when none brings loads closer."""
    mine = np.arange(len(work)) if len(work) <= EVERY_PAIR else np.flatnonzero(rank == load.argmax())
    # A row goes; another comes back from the rank that it goes to, or nothing does.
    back = np.append(work, np.zeros(len(load), dtype=np.int64))
    target = np.append(rank, np.arange(len(load)))
    change = work[mine][:, None] - back
    gain = change * (load[rank[mine]][:, None] - load[target] - change)
    if cap is not None:
        gain[:, len(work) :][:, np.bincount(rank, minlength=len(load)) >= cap] = 0
    goes, comes = divmod(int(gain.argmax()), len(back))
    if gain[goes, comes] <= 0:
        return False
    source = rank[mine[goes]]
    load[source] -= change[goes, comes]
    load[target[comes]] += change[goes, comes]
    rank[mine[goes]] = target[comes]
    if comes < len(work):
        rank[comes] = source
    return True


def _share(work: np.ndarray, rank: np.ndarray, load: np.ndarray, cap: int | None) -> bool:
    """Shares the rows of the fullest rank and the least loaded with which that helps, in the best of all ways."""
    full = int(load.argmax())
    for other in np.argsort(load, kind="stable").tolist():
        rows = np.flatnonzero((rank == full) | (rank == other))
        if other == full or len(rows) > SHARED_ROWS:
            continue
        sums, size = np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.int64)  # of the subset whose bits are the index
        for row in rows:
            sums, size = np.concatenate([sums, sums + work[row]]), np.concatenate([size, size + 1])
        after = np.maximum(sums, load[full] + load[other] - sums)
        if cap is not None:
            after[(size > cap) | (len(rows) - size > cap)] = load[full]
        best = int(after.argmin())
        if after[best] < load[full]:
            rank[rows] = np.where(best >> np.arange(len(rows)) & 1, full, other)
            load[full], load[other] = sums[best], load[full] + load[other] - sums[best]
            return True
    return False
