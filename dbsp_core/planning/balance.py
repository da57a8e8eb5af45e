"""Balance of work on ranks: how uneven it is, how even it could be, and trades of items that level it. Only numpy.

An item is a row or a whole head: no rank waits for another between two chunks of keys, so only the sum of a rank's
rows has to be balanced.
"""

from __future__ import annotations

import numpy as np

FEW_ITEMS = 64  # up to which any two ranks swap items, not only the fullest and another
SUBSET_ITEMS = 12  # of a rank, up to which any of its subsets is traded, not only single items


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


def level(work: np.ndarray, rank: np.ndarray, ranks: int, limit: int, cap: int | None = None) -> np.ndarray:
    """Trades items of the fullest rank with others, few and heavy ones, until none is above `limit` or none helps.

    Args:
        work: int64[n], active blocks of each item.
        rank: int64[n], where each item is.
        limit: Work of the fullest rank that is good enough, at least the mean.
        cap: Most items of a rank; None: any number, and items without work stay where they are.

    Returns:
        int64[n], the rank of each item.
    """
    load = np.bincount(rank, work, ranks).astype(np.int64)
    if load.max() <= limit:
        return rank
    items = heaviest_first(work)
    if cap is None:
        items = items[: np.count_nonzero(work)]
    sizes, held_by = work[items], rank[items].astype(np.int64)
    few = len(items) <= FEW_ITEMS
    for _ in range(32 * ranks):
        if load.max() <= limit:
            break
        if not (few and _swap(sizes, held_by, load, cap)) and not _trade(sizes, held_by, load, limit, cap):
            break
    rank = rank.copy()
    rank[items] = held_by
    return rank


def _swap(sizes: np.ndarray, held_by: np.ndarray, load: np.ndarray, cap: int | None) -> bool:
    """Makes the move or swap of single items that brings loads closest, by the sum of their squares; False if none.

    `held_by` and `load` are changed in place.
    """
    items, ranks = np.arange(len(sizes)), np.arange(len(load))
    # 1. An item goes; another comes back from the rank that it goes to, or nothing does: [items, items + ranks].
    back, target = np.append(sizes, 0 * ranks), np.append(held_by, ranks)
    change = sizes[:, None] - back
    gain = change * (load[held_by][:, None] - load[target] - change)
    if cap is not None:
        gain[:, len(items) :][:, np.bincount(held_by, minlength=len(ranks)) >= cap] = 0
    goes, comes = np.unravel_index(gain.argmax(), gain.shape)
    if gain[goes, comes] <= 0:
        return False
    # 2. Swap.
    source, destination = held_by[goes], target[comes]
    load[source] -= change[goes, comes]
    load[destination] += change[goes, comes]
    held_by[goes] = destination
    if comes < len(items):
        held_by[comes] = source
    return True


def _trade(sizes: np.ndarray, held_by: np.ndarray, load: np.ndarray, limit: int, cap: int | None) -> bool:
    """Trades items of the fullest rank with the emptiest with which that lowers the fuller of the two; False if none.

    `held_by` and `load` are changed in place; `sizes` fall.
    """
    full, count = int(load.argmax()), np.bincount(held_by, minlength=len(load))
    goal = (int(load.sum()) // len(load) + limit) // 2
    ours = np.flatnonzero(held_by == full)
    for other in np.argsort(load, kind="stable").tolist():
        wanted = min(int(load[full]) - goal, int(load[full] - load[other]) // 2)
        if wanted <= 0:
            return False
        # 1. What comes closest; if there may be any number, the heaviest that fit, and the lightest for several.
        theirs = np.flatnonzero(held_by == other)
        if cap is None:
            trades = [
                closest_trade(sizes, ours, theirs, wanted),
                (_heaviest_run(sizes, ours, wanted), theirs[:0]),
                (ours[-1:], _heaviest_run(sizes, theirs, int(sizes[ours[-1]]) - wanted)),
            ]
        else:
            surplus = range(int(count[full]) - cap, cap - int(count[other]) + 1)
            trades = [closest_trade(sizes, ours, theirs, wanted + (more << 40), 1 << 40) for more in surplus]
        # 2. The most work for the fewest items.
        change = [int(sizes[leaving].sum() - sizes[coming].sum()) for leaving, coming in trades]
        gain = [max(0, wanted - abs(wanted - moved)) for moved in change]
        best = max(range(len(trades)), key=lambda i: gain[i] ** 2 / max(1, sum(map(len, trades[i]))))
        if gain[best]:
            held_by[trades[best][0]], held_by[trades[best][1]] = other, full
            load[full] -= change[best]
            load[other] += change[best]
            return True
    return False


def _heaviest_run(sizes: np.ndarray, items: np.ndarray, room: int) -> np.ndarray:
    """Chooses of `items`, rising indices of the falling `sizes`, the heaviest run that fits a room."""
    items = items[np.searchsorted(-sizes[items], -room) :]
    return items[: np.searchsorted(np.cumsum(sizes[items]), room, side="right")]


def closest_trade(
    sizes: np.ndarray, ours: np.ndarray, theirs: np.ndarray, wanted: int, each: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Chooses some of ours and some of theirs whose difference in work is closest to `wanted`.

    Args:
        sizes: int64[n], active blocks of each item.
        ours, theirs: int64 each, indices of `sizes`. Of at most `SUBSET_ITEMS` any subset is tried, of more each
            alone and none.
        wanted: Active blocks.
        each: Added to the size of each item, so that `wanted` says how many more of ours there are.
    """
    give, back = _sums(sizes[ours] + each), _sums(sizes[theirs] + each)
    order = np.argsort(back, kind="stable")
    above = np.searchsorted(back[order], give - wanted).clip(max=len(back) - 1)
    partner = order[np.stack((above, (above - 1).clip(min=0)))]  # [2, give]
    side, leaving = np.unravel_index(np.abs(give - back[partner] - wanted).argmin(), partner.shape)
    return _chosen(ours, int(leaving)), _chosen(theirs, int(partner[side, leaving]))


def _sums(sizes: np.ndarray) -> np.ndarray:
    """Returns int64[choices]: the work of each choice of items, as `_chosen` numbers them."""
    if len(sizes) > SUBSET_ITEMS:
        return np.append(sizes, 0)
    sums = np.zeros(1, dtype=np.int64)
    for size in sizes:
        sums = np.concatenate((sums, sums + size))
    return sums


def _chosen(items: np.ndarray, choice: int) -> np.ndarray:
    """Returns the items of a choice: an item or none of many, of few those whose bits are set."""
    return items[choice : choice + 1] if len(items) > SUBSET_ITEMS else items[choice >> np.arange(len(items)) & 1 == 1]
