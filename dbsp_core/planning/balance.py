"""Balance of work over ranks: ρ_s, its lower bound, and trades of items between ranks. Numpy only.

An item is a row or a whole head. Ranks do not wait for each other between chunks of keys, so only the sum of a rank's
rows is balanced.
"""

from __future__ import annotations

import numpy as np

FEW_ITEMS = 64  # up to this many items, any two ranks swap, not only the fullest with another
SUBSET_ITEMS = 12  # up to this many items of a rank, trade any subset, not only single items


def work_by_rank(owner: np.ndarray, row_work: np.ndarray, world: int) -> np.ndarray:
    """Sums active blocks per rank: owner int64[H, nq], row_work int64[H, nq] → int64[P]."""
    return np.bincount(owner.ravel(), row_work.ravel(), world).astype(np.int64)


def imbalance_ratio(work: np.ndarray) -> float:
    """Returns ρ_s, the slowest rank's work over the mean, from int64[P]; 1.0 if there is no work."""
    blocks = work.tolist()  # 10× faster than numpy for so few numbers
    total = sum(blocks)
    return float(max(blocks) * len(blocks) / total) if total else 1.0


def rho_bound(row_work: np.ndarray, world: int) -> float:
    """Returns a lower bound of ρ_s for plans of whole rows, from active blocks of each row int64[H, nq]."""
    total = int(row_work.sum())
    return bins_bound(row_work.ravel(), world) * world / total if total else 1.0


def bins_bound(items: np.ndarray, bins: int) -> int:
    """Returns a lower bound of the fullest bin's load when whole `items` int[n] are packed into `bins`.

    It is the mean rounded up, or by the pigeonhole principle for any k: k + 1 of the k·bins + 1 largest items share a
    bin, whose load is at least that of the k + 1 smallest of them.
    """
    total = int(items.sum())
    if bins == 1:
        return total
    prefix = np.zeros(len(items) + 1, dtype=np.int64)
    np.cumsum(items[heaviest_first(items)], out=prefix[1:])
    last = np.arange(0, len(items), bins)  # items[: last + 1] are the k·bins + 1 largest
    return max(-(-total // bins), int((prefix[last + 1] - prefix[last - last // bins]).max(initial=0)))


def heaviest_first(work: np.ndarray) -> np.ndarray:
    """Returns indices of items int64[n] by descending work, stable."""
    falling = work.max(initial=0) - work
    # uint16 is sorted by radix, which is much faster.
    return np.argsort(falling.astype(np.uint16) if work.max(initial=0) < 1 << 16 else falling, kind="stable")


def load_limit(total: int, ranks: int, target_rho: float) -> int:
    """Returns the largest acceptable work of a rank: `target_rho` times the mean, at least the mean rounded up."""
    return max(-(-total // ranks), int(total * target_rho) // ranks)


def level(work: np.ndarray, rank: np.ndarray, ranks: int, limit: int, cap: int | None = None) -> np.ndarray:
    """Trades few, heavy items of the fullest rank with others until no rank exceeds `limit` or no trade helps.

    Args:
        work, rank: int64[n], active blocks and rank of each item.
        limit: Acceptable work of the fullest rank, at least the mean.
        cap: Most items per rank. None: any number; items without work then stay in place.

    Returns int64[n], the rank of each item.
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
    """Moves or swaps the items that most reduce Σ load², in `held_by` and `load`; returns False if none does."""
    items, ranks = np.arange(len(sizes)), np.arange(len(load))
    # 1. Each item goes, for another item or nothing of the target rank: [items, items + ranks]
    back, target = np.append(sizes, 0 * ranks), np.append(held_by, ranks)
    change = sizes[:, None] - back
    gain = change * (load[held_by][:, None] - load[target] - change)
    if cap is not None:
        gain[:, len(items) :][:, np.bincount(held_by, minlength=len(ranks)) >= cap] = 0
    goes, comes = np.unravel_index(gain.argmax(), gain.shape)
    if gain[goes, comes] <= 0:
        return False
    # 2. Swap
    source, destination = held_by[goes], target[comes]
    load[source] -= change[goes, comes]
    load[destination] += change[goes, comes]
    held_by[goes] = destination
    if comes < len(items):
        held_by[comes] = source
    return True


def _trade(sizes: np.ndarray, held_by: np.ndarray, load: np.ndarray, limit: int, cap: int | None) -> bool:
    """Trades items of the fullest rank with the emptiest rank that lowers their maximum; returns False if none does.

    Updates `held_by` and `load` in place; `sizes` are descending.
    """
    full, count = int(load.argmax()), np.bincount(held_by, minlength=len(load))
    goal = (int(load.sum()) // len(load) + limit) // 2
    ours = np.flatnonzero(held_by == full)
    for other in np.argsort(load, kind="stable").tolist():
        wanted = min(int(load[full]) - goal, int(load[full] - load[other]) // 2)
        if wanted <= 0:
            return False
        # 1. Candidates: the closest trade; without a cap, also the heaviest run that fits
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
        # 2. Take the most work for the fewest items
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
    """Returns the heaviest run of `items` (ascending indices of descending `sizes`) that fits into `room`."""
    items = items[np.searchsorted(-sizes[items], -room) :]
    return items[: np.searchsorted(np.cumsum(sizes[items]), room, side="right")]


def closest_trade(
    sizes: np.ndarray, ours: np.ndarray, theirs: np.ndarray, wanted: int, each: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Returns a choice of our and of their items whose difference in work is closest to `wanted`.

    `ours` and `theirs` are indices of `sizes` int64[n]. All subsets of up to `SUBSET_ITEMS` items are tried, of more
    items each alone and none. `each` is added to each size, so that `wanted` can also set the difference in number.
    """
    give, back = _sums(sizes[ours] + each), _sums(sizes[theirs] + each)
    order = np.argsort(back, kind="stable")
    above = np.searchsorted(back[order], give - wanted).clip(max=len(back) - 1)
    partner = order[np.stack((above, (above - 1).clip(min=0)))]  # [2, give]
    side, leaving = np.unravel_index(np.abs(give - back[partner] - wanted).argmin(), partner.shape)
    return _chosen(ours, int(leaving)), _chosen(theirs, int(partner[side, leaving]))


def _sums(sizes: np.ndarray) -> np.ndarray:
    """Returns the work of each choice of items int64[choices], numbered as in `_chosen`."""
    if len(sizes) > SUBSET_ITEMS:
        return np.append(sizes, 0)
    sums = np.zeros(1, dtype=np.int64)
    for size in sizes:
        sums = np.concatenate((sums, sums + size))
    return sums


def _chosen(items: np.ndarray, choice: int) -> np.ndarray:
    """Returns the items of a choice: the set bits if there are few items, else one item or none."""
    return items[choice : choice + 1] if len(items) > SUBSET_ITEMS else items[choice >> np.arange(len(items)) & 1 == 1]
