"""Rows to ranks, until every rank has the same work in all. Only numpy, and only integers: all ranks plan alike.

No rank waits for another between two chunks of keys, so nothing but the sum of a rank's rows has to be even.
"""

from __future__ import annotations

import numpy as np

from dbsp_core.planning.heads import balance_heads, contiguous_heads, load_limit, local_search_heads

__all__ = ["level_rows", "plan_rows"]

COLUMN_SHARE = 0.5  # of a hybrid's tolerance, what its columns of ranks may take
FEW_ROWS = 512  # with work: so few that every move and swap is tried


def plan_rows(
    work: np.ndarray,
    home: np.ndarray,
    ulysses: int,
    ring: int,
    target_rho: float = 1.002,
    position: np.ndarray | None = None,
    whole_rho: float = 1.01,
) -> np.ndarray:
    """Assigns rows: heads whole where that is even, rows where they live where that is even.

    Args:
        work: int64[H, nq], dense blocks of each row.
        home: int64[nq] or int64[H, nq], the ring rank that holds most of each query block.
        ulysses: x, among which heads are shared out.
        ring: y, among which the rows of a head are.
        target_rho: ρ_s at which to stop.
        position: float64[nq], where query blocks are in the order of tokens. Given, each column's rows are cut into
            runs of it instead of staying where they live: rows near one another need much the same keys.
        whole_rho: ρ_s with which no head is split where there is no ring. Then nothing hides that the keys of a split
            head are sent twice: by the latency model that takes about as long as a hundredth of the kernel's time.

    Returns:
        int64[H, nq], the owner of each row: ring rank · x + Ulysses rank.
    """
    total = int(work.sum())
    # 1. Heads to columns of ranks, the fewest split: their keys would be sent to two columns.
    share = 1 if ring == 1 else COLUMN_SHARE
    order = _interleaved(home, ring) if position is None else np.argsort(position, kind="stable")
    owner = balance_heads(work, ulysses, 1 + share * (target_rho - 1), order, whole_rho if ring == 1 else 1.0)
    if ring == 1 and (owner == owner[:, :1]).all() and _fullest(work, owner) * ulysses <= total * whole_rho:
        return owner
    if ring > 1:
        # 2. Each column's rows to its ring ranks.
        places = np.ascontiguousarray(np.broadcast_to(home, work.shape))
        if position is not None:
            places = _runs_by_column(work, owner, order, ulysses, ring)
        flat, columns = work.ravel(), owner.ravel()
        places = places.ravel().copy()
        for column in range(ulysses if position is None else 0):
            rows = np.flatnonzero(columns == column)
            of_column = places[rows]
            level_rows(flat[rows], of_column, ring, load_limit(int(flat[rows].sum()), ring, target_rho))
            places[rows] = of_column
        owner = (places * ulysses + columns).reshape(work.shape)
    # 3. What columns of few or equal rows leave over is evened out over all ranks.
    limit = load_limit(total, ulysses * ring, target_rho)
    level_rows(work.ravel(), owner.ravel(), ulysses * ring, limit)
    # 4. With few rows, leaving them where they live may be more even than all of this.
    fullest = _fullest(work, owner)
    stay = home * ulysses + contiguous_heads(len(work), ulysses)[:, None]
    return stay if fullest > limit and _fullest(work, stay) < fullest else owner


def _fullest(work: np.ndarray, owner: np.ndarray) -> int:
    """Work of the fullest rank."""
    return int(np.bincount(owner.ravel(), work.ravel()).max(initial=0))


def level_rows(work: np.ndarray, place: np.ndarray, places: int, limit: int) -> None:
    """Moves rows from the fullest place to others, few and heavy ones, until none is above `limit` or none helps.

    Args:
        work: int64[n], of each row.
        place: int64[n], changed in place.
        places: Number of places.
        limit: Work of the fullest place that is good enough.
    """
    load = np.bincount(place, work, places).astype(np.int64)
    if load.max(initial=0) <= limit:
        return
    order = np.flatnonzero(work)
    falling = work.max() - work[order]
    order = order[
        np.argsort(falling.astype(np.uint16) if work.max() < 1 << 16 else falling, kind="stable")
    ]  # by radix
    sizes, where = work[order], place[order]
    for _ in range(8 * places):
        if load.max() <= limit or not _relieve(sizes, where, load):
            break
    if load.max() > limit and len(order) <= FEW_ROWS:
        where = local_search_heads(sizes, where, places, limit)
    place[order] = where


def _relieve(sizes: np.ndarray, where: np.ndarray, load: np.ndarray) -> bool:
    """Moves rows from the fullest place to the emptiest that lowers the fuller of the two; False if none does."""
    full, mean = int(load.argmax()), int(load.sum()) // len(load)
    ours = np.flatnonzero(where == full)
    for other in np.argsort(load, kind="stable").tolist():
        room = int(load[full] - load[other])
        if room <= 1:
            return False
        wanted = min(int(load[full]) - mean, max(mean - int(load[other]), room // 2))
        given, taken = _trade(sizes, ours, np.flatnonzero(where == other), wanted)
        moved = int(sizes[given].sum() - sizes[taken].sum())
        if 0 < moved < room:
            where[given], where[taken] = other, full
            load[full] -= moved
            load[other] += moved
            return True
    return False


def _trade(sizes: np.ndarray, ours: np.ndarray, theirs: np.ndarray, wanted: int) -> tuple[np.ndarray, np.ndarray]:
    """Chooses rows of ours, or one of them for some of theirs, whose difference in work is about `wanted`.

    Args:
        sizes: int64[n], falling.
        ours, theirs: Rising indices of `sizes`.
    """
    nothing = ours[:0]
    light = _fitting(sizes, ours, wanted)
    if len(light) or not len(ours):
        return light, nothing
    if not len(theirs):
        return nothing, nothing
    # No row is light enough: two change sides. `back` is the first of theirs that leaves no more than wanted to move,
    # and the one before it.
    own, their = sizes[ours], sizes[theirs]
    back = np.searchsorted(-their, wanted - own)
    back = np.concatenate([np.minimum(back, len(their) - 1), np.maximum(back - 1, 0)])
    difference = np.tile(own, 2) - their[back]
    miss = np.where(difference > 0, np.abs(difference - wanted), np.iinfo(np.int64).max)
    best = int(miss.argmin())
    # Or our lightest goes, and several of theirs come for it.
    several = _fitting(sizes, theirs, int(own[-1]) - wanted)
    if abs(int(own[-1] - sizes[several].sum()) - wanted) < miss[best]:
        return ours[-1:], several
    one = best % len(ours)
    return ours[one : one + 1], theirs[back[best] : back[best] + 1]


def _fitting(sizes: np.ndarray, rows: np.ndarray, room: int) -> np.ndarray:
    """Chooses the fewest rows that nearly fill a room and no more; arguments are those of `_trade`."""
    rows = rows[np.searchsorted(-sizes[rows], -room) :]
    if room <= 0 or not len(rows):
        return rows[:0]
    # 1. A run of as few as can, from where on it is not too much.
    total = np.concatenate([[0], np.cumsum(sizes[rows])])
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


def _runs_by_column(work: np.ndarray, owner: np.ndarray, order: np.ndarray, ulysses: int, ring: int) -> np.ndarray:
    """int64[H, nq]: ring ranks of rows, each column's in runs of equal work, all of its heads side by side."""
    by_block = np.ascontiguousarray(work[:, order].T)  # block by block, all heads of a block together
    columns = owner[:, order].T
    found = np.zeros(by_block.shape, dtype=np.int64)
    for column in range(ulysses):
        here = columns == column
        of_column = by_block[here]
        of_column = of_column if of_column.any() else np.ones_like(of_column)
        middle = np.cumsum(of_column) - (of_column + 1) // 2
        found[here] = np.minimum(middle * ring // int(of_column.sum() or 1), ring - 1)
    places = np.empty(work.shape, dtype=np.int64)
    places[:, order] = found.T
    return places


def _interleaved(home: np.ndarray, ring: int) -> np.ndarray:
    """int64[nq]: query blocks in an order that visits the ring ranks in turn, so that a run takes equally from each.

    Where homes differ between heads, the order is the first head's: it only decides how even the start is.
    """
    home = home if home.ndim == 1 else home[0]
    turn = np.empty(len(home), dtype=np.int64)
    for rank in range(ring):
        mine = home == rank
        turn[mine] = np.arange(mine.sum())
    return np.argsort(turn, kind="stable")
