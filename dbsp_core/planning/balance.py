"""Balance of work on ranks: how uneven it is, how even it could be, and trades of items that level it. Only numpy.

An item is a row or a whole head: no rank waits for another between two chunks of keys, so only the sum of a rank's
rows has to be balanced.
"""

from __future__ import annotations

import numpy as np

FEW_ITEMS = 64  # up to which all ranks exchange items, not only the fullest
SHARED_ITEMS = 14  # of two ranks, up to which every way to share them is tried


def work_by_rank(owner: np.ndarray, row_work: np.ndarray, world: int) -> np.ndarray:
    """Returns int64[P]: active blocks of each rank, from int64[H, nq] each: rows' ranks, and active blocks."""
    return np.bincount(owner.ravel(), row_work.ravel(), world).astype(np.int64)


def imbalance_ratio(work: np.ndarray) -> float:
    """Returns ρ_s: the slowest rank's work over the mean, from int64[P]. No work at all is balanced: 1.0."""
    blocks = work.tolist()  # of so few numbers numpy's own sum and maximum take ten times as long
    total = sum(blocks)
    return float(max(blocks) * len(blocks) / total) if total else 1.0


def rho_bound(row_work: np.ndarray, world: int) -> float:
    """Returns ρ_s ≥ 1 that no plan of whole rows can beat, from int64[H, nq] active blocks of each row."""
    total = int(row_work.sum())
    return bins_bound(row_work.ravel(), world) * world / total if total else 1.0


def bins_bound(items: np.ndarray, bins: int) -> int:
    """Returns the least load of the fullest of `bins` bins when `items` (int[n]) are packed whole.

    The mean, rounded up; and, by the pigeonhole principle for every k, k + 1 of the k·bins + 1 largest items share a
    bin, which then holds at least the k + 1 smallest of them.
    """
    total = int(items.sum())
    if bins == 1:
        return total
    prefix = np.zeros(len(items) + 1, dtype=np.int64)
    np.cumsum(items[heaviest_first(items)], out=prefix[1:])
    last = np.arange(0, len(items), bins)  # the k·bins + 1 largest are items[: last + 1]
    return max(-(-total // bins), int((prefix[last + 1] - prefix[last - last // bins]).max(initial=0)))


def heaviest_first(work: np.ndarray) -> np.ndarray:
    """Returns int64[n], the indices of items by falling work, equal ones in their order."""
    falling = work.max(initial=0) - work
    # Small numbers are sorted by radix, which is much faster.
    return np.argsort(falling.astype(np.uint16) if work.max(initial=0) < 1 << 16 else falling, kind="stable")


def load_limit(total: int, ranks: int, target_rho: float) -> int:
    """Returns the work of the fullest of `ranks` that is good enough: what `target_rho` allows, at least the mean."""
    return max(-(-total // ranks), int(total * target_rho) // ranks)


def level(work: np.ndarray, rank: np.ndarray, ranks: int, limit: int) -> np.ndarray:
    """Trades rows of the fullest rank with others, few and heavy ones, until none is above `limit` or none helps.

    Args:
        work: int64[n], active blocks of each row.
        rank: int64[n], where each row is.

    Returns:
        int64[n], the rank of each row.
    """
    load = np.bincount(rank, work, ranks).astype(np.int64)
    if load.max() <= limit:
        return rank
    # 1. Rows with work, heaviest first.
    rows = heaviest_first(work)[: np.count_nonzero(work)]
    sizes, held_by = work[rows], rank[rows]
    # 2. The fullest rank trades with the emptiest with which that helps; few are then exchanged in every way.
    for _ in range(32 * ranks):
        if load.max() <= limit or not _trade(sizes, held_by, load, limit):
            break
    if len(rows) <= FEW_ITEMS:
        held_by = exchange(sizes, held_by, ranks, limit)
    rank = rank.copy()
    rank[rows] = held_by
    return rank


def _trade(sizes: np.ndarray, held_by: np.ndarray, load: np.ndarray, limit: int) -> bool:
    """Moves rows from the fullest rank to the emptiest that lowers the fuller of the two; False if none does.

    `held_by` and `load` are changed in place.
    """
    full = int(load.argmax())
    goal = (int(load.sum()) // len(load) + limit) // 2
    ours = np.flatnonzero(held_by == full)
    for other in np.argsort(load, kind="stable").tolist():
        room = int(load[full] - load[other])
        if room <= 1:
            return False
        wanted = min(int(load[full]) - goal, room // 2)
        # 1. The heaviest that fit; the lightest that does not, for several; one for one or none.
        theirs = np.flatnonzero(held_by == other)
        trades = [
            (_fill(sizes, ours, wanted), theirs[:0]),
            (ours[-1:], _fill(sizes, theirs, int(sizes[ours[-1]]) - wanted)),
            closest_pair(sizes, ours, theirs, wanted),
        ]
        # 2. The most work, unless another moves twice as much with each row, and not much less in all.
        change = [int(sizes[leaving].sum() - sizes[coming].sum()) for leaving, coming in trades]
        gain = [wanted - abs(wanted - moved) for moved in change]
        rate = [
            gain[i] * 1024 // max(1, len(leaving) + len(coming)) if gain[i] * 16 >= max(gain) else 0
            for i, (leaving, coming) in enumerate(trades)
        ]
        best = max(range(len(trades)), key=lambda i: gain[i] if 2 * rate[i] >= max(rate) else 0)
        if gain[best] > 0:
            held_by[trades[best][0]], held_by[trades[best][1]] = other, full
            load[full] -= change[best]
            load[other] += change[best]
            return True
    return False


def _fill(sizes: np.ndarray, rows: np.ndarray, room: int) -> np.ndarray:
    """Chooses of `rows`, rising indices of the falling `sizes`, the heaviest run that fits a room."""
    rows = rows[np.searchsorted(-sizes[rows], -room) :]
    return rows[: np.searchsorted(np.cumsum(sizes[rows]), room, side="right")] if room > 0 else rows[:0]


def closest_pair(
    sizes: np.ndarray, ours: np.ndarray, theirs: np.ndarray, wanted: int
) -> tuple[np.ndarray, np.ndarray]:
    """Chooses one of ours, and one of theirs or none, whose difference in work is closest to `wanted`.

    Args:
        sizes: int64[n], falling.
        ours, theirs: Rising indices of `sizes`, int64 each.
    """
    if not len(ours):
        return ours, ours
    give, back = sizes[ours], np.append(sizes[theirs], 0)
    above = np.searchsorted(-back, wanted - give).clip(max=len(theirs))  # the first that leaves `wanted` or more
    partner = np.stack((above, (above - 1).clip(min=0)))  # [2, ours]
    side, goes = np.unravel_index(np.abs(give - back[partner] - wanted).argmin(), partner.shape)
    comes = int(partner[side, goes])
    return ours[goes : goes + 1], theirs[comes : comes + 1]


def exchange(work: np.ndarray, rank: np.ndarray, ranks: int, limit: int, cap: int | None = None) -> np.ndarray:
    """Moves or swaps single items until no rank is above `limit`, or the fullest one cannot be helped.

    A step brings loads closest, by the sum of their squares. Where none helps the fullest rank, its and another rank's
    items are shared in the best of all ways.

    Args:
        work: int64[n], active blocks of each item, a row or a head.
        rank: int64[n], where each is.
        cap: Most items of a rank, or None.

    Returns:
        int64[n], the rank of each item.
    """
    rank, load = rank.astype(np.int64), np.bincount(rank, work, ranks).astype(np.int64)
    for _ in range(4 * (ranks + len(work))):
        if load.max() <= limit or not (_swap(work, rank, load, cap) or _share(work, rank, load, cap)):
            break
    return rank


def _swap(work: np.ndarray, rank: np.ndarray, load: np.ndarray, cap: int | None) -> bool:
    """Makes the best move or swap in place; False when none brings loads closer."""
    mine = np.arange(len(work)) if len(work) <= FEW_ITEMS else np.flatnonzero(rank == load.argmax())
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
        if other == full or len(rows) > SHARED_ITEMS:
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
