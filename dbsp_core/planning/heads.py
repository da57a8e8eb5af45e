"""Heads to Ulysses ranks, split at query-block boundaries where whole heads cannot balance. Only numpy.

Whole heads are assigned largest first and refined by moves and swaps. Where a Ulysses rank stays too full, a run of
its rows is cut off and given to a Ulysses rank with room, the idea of McNaughton's wrap-around rule (Scheduling with
deadlines and loss functions, Management Science 6, 1959): x Ulysses ranks need at most x − 1 cuts. Wrap-around cuts at
every Ulysses rank boundary; starting from whole heads, only Ulysses ranks above the tolerance are cut.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

__all__ = [
    "balance_heads",
    "contiguous_heads",
    "greedy_heads",
    "load_limit",
    "local_search_heads",
    "snake_heads",
    "trade_single_rows",
]

PAIR_HEADS = 14  # most heads of two Ulysses ranks for which every way to share them is tried


def load_limit(total: int, places: int, target_rho: float) -> int:
    """Returns the work of the fullest of `places` that is good enough: what `target_rho` allows, at least the mean."""
    return max(-(-total // places), int(total * target_rho) // places)


def local_search_heads(
    work: np.ndarray, ulysses_rank: np.ndarray, ulysses_degree: int, limit: int, cap: int | None = None
) -> np.ndarray:
    """Moves and swaps whole heads until no Ulysses rank is above `limit`, or the fullest one cannot be helped.

    A step takes one head out of the fullest Ulysses rank, with or without one in return; where that does not help, it
    shares the heads of the fullest and another rank in the best of all ways. Each step lowers the fullest rank's load.

    Args:
        work: int[H], of each head; `ulysses_rank`, int[H], is where it starts.
        cap: Most heads of a Ulysses rank, or None.

    Returns:
        int64[H], the Ulysses rank of each head.
    """
    ulysses_rank = ulysses_rank.astype(np.int64)
    load = np.bincount(ulysses_rank, weights=work, minlength=ulysses_degree).astype(np.int64)
    for _ in range(4 * ulysses_degree + len(work)):
        fullest = int(load.argmax())
        if load[fullest] <= limit or not (
            _swap(work, ulysses_rank, load, fullest, cap)
            or (cap is None and _share_with_another(work, ulysses_rank, load, fullest))
        ):
            break
    return ulysses_rank


def _swap(work: np.ndarray, ulysses_rank: np.ndarray, load: np.ndarray, fullest: int, cap: int | None) -> bool:
    """Makes the best move or swap of one head of `fullest` in place; False when none lowers its load."""
    mine, others = np.flatnonzero(ulysses_rank == fullest), np.flatnonzero(ulysses_rank != fullest)
    # a head of `fullest` goes; another comes back from the Ulysses rank it goes to, or nothing does
    back = np.concatenate([work[others], np.zeros(len(load), dtype=work.dtype)])
    target = np.concatenate([ulysses_rank[others], np.arange(len(load))])
    change = work[mine][:, None] - back
    after = np.maximum(load[fullest] - change, load[target] + change)
    if cap is not None:
        full = np.bincount(ulysses_rank, minlength=len(load)) >= cap
        after[:, len(others) :][:, full] = load[fullest]  # which is no gain
    goes, comes = divmod(int(after.argmin()), len(back))
    if after[goes, comes] >= load[fullest]:
        return False
    load[fullest] -= change[goes, comes]
    load[target[comes]] += change[goes, comes]
    ulysses_rank[mine[goes]] = target[comes]
    if comes < len(others):
        ulysses_rank[others[comes]] = fullest
    return True


def _share_with_another(work: np.ndarray, ulysses_rank: np.ndarray, load: np.ndarray, fullest: int) -> bool:
    """Shares the heads of `fullest` and another Ulysses rank again, as evenly as possible; False if none helps.

    The other rank is the least loaded with which the load of `fullest` falls.
    """
    for other in np.argsort(load, kind="stable"):
        heads = np.flatnonzero((ulysses_rank == fullest) | (ulysses_rank == other))
        if other == fullest or len(heads) > PAIR_HEADS:
            continue
        sums = np.zeros(1, dtype=np.int64)  # sums[m]: work of the subset whose bits are m
        for head in heads:
            sums = np.concatenate([sums, sums + work[head]])
        both = load[fullest] + load[other]
        best = int(np.abs(2 * sums - both).argmin())
        if max(sums[best], both - sums[best]) < load[fullest]:
            ulysses_rank[heads] = np.where(best >> np.arange(len(heads)) & 1, fullest, other)
            load[fullest], load[other] = sums[best], both - sums[best]
            return True
    return False


SHOWN = 128  # rows of each side looked at in a trade


def trade_single_rows(row_work: np.ndarray, owner: np.ndarray, head_work_by_rank: np.ndarray, limit: int) -> None:
    """Moves single rows out of the fullest Ulysses rank, or swaps them for others of the same head, down to `limit`.

    Rows only move between Ulysses ranks that both have the head already, so that no K or V is sent once more. Each
    trade lowers the fullest rank's load. `owner` and `head_work_by_rank`, int64[H, x], are changed in place.
    """
    load = head_work_by_rank.sum(axis=0)
    shared = (head_work_by_rank > 0).sum(axis=1) > 1
    for _ in range(4 * len(load)):
        fullest = int(load.argmax())
        heads = np.flatnonzero(shared & (head_work_by_rank[:, fullest] > 0))
        if load[fullest] <= limit or len(heads) == 0:
            return
        lightest = np.where(head_work_by_rank[heads] > 0, load, load.sum() + 1).argmin(axis=1)
        trades = [
            (*_best_trade(row_work[h], owner[h], load, fullest, c), h, c)
            for h, c in zip(heads.tolist(), lightest.tolist(), strict=True)
        ]
        after, given, taken, head, other = min(trades)
        if after >= load[fullest]:
            return
        owner[head, given] = other
        work = int(row_work[head, given])
        if taken >= 0:
            owner[head, taken] = fullest
            work -= int(row_work[head, taken])
        load[[fullest, other]] += [-work, work]
        head_work_by_rank[head, [fullest, other]] += [-work, work]


def _best_trade(
    work: np.ndarray, owner: np.ndarray, load: np.ndarray, fullest: int, other: int
) -> tuple[int, int, int]:
    """Returns (load of the fuller of the two Ulysses ranks afterwards, row given, row taken or −1)."""
    give, take = np.flatnonzero(owner == fullest)[:SHOWN], np.flatnonzero(owner == other)[:SHOWN]
    if len(give) == 0:
        return int(load[fullest]), -1, -1
    change = work[give, None] - np.append(work[take], 0)
    after = np.maximum(load[fullest] - change, load[other] + change)
    row, ulysses_rank = divmod(int(after.argmin()), after.shape[1])
    return int(after[row, ulysses_rank]), int(give[row]), int(take[ulysses_rank]) if ulysses_rank < len(take) else -1


@dataclass(frozen=True)
class HeadSplit:
    """Rows go from Ulysses rank `source` to Ulysses rank `target`, until the load of `source` is `level`."""

    source: int
    target: int
    level: int


def balance_heads(
    row_work: np.ndarray,
    ulysses_degree: int,
    target_rho: float = 1.002,
    row_order: np.ndarray | None = None,
    whole_rho: float = 1.0,
) -> np.ndarray:
    """Assigns rows to Ulysses ranks: heads whole where that is balanced, a few of them split otherwise.

    Args:
        row_work: int[H, nq], dense blocks per (head, query block).
        target_rho: Fullest Ulysses rank over mean (ρ_s of U{x}R1) that is good enough.
        row_order: int[nq], order of the query blocks in which a head is cut; by number when None.
        whole_rho: The same with which no head is split: the price of sending its keys to two ranks.

    Returns:
        int64[H, nq], the Ulysses rank of each row.
    """
    # 1. Whole heads, largest first, then moved and swapped: in equal numbers, so that no rank is sent more keys than
    #    others, or else in any.
    work = row_work.sum(axis=1)
    total = int(work.sum())
    limit = load_limit(total, ulysses_degree, target_rho)
    good, cap = max(limit, load_limit(total, ulysses_degree, whole_rho)), -(-len(work) // ulysses_degree)
    ulysses_rank = local_search_heads(work, greedy_heads(work, ulysses_degree, cap), ulysses_degree, limit, cap)
    if np.bincount(ulysses_rank, work).max() > good:
        ulysses_rank = local_search_heads(work, greedy_heads(work, ulysses_degree), ulysses_degree, limit)
    head_work_by_rank = np.zeros((len(work), ulysses_degree), dtype=np.int64)
    head_work_by_rank[np.arange(len(work)), ulysses_rank] = work
    # 2. Where a rank stays too full, runs of rows are cut off its largest head.
    load = head_work_by_rank.sum(axis=0).tolist()
    splits = _choose_splits(load, limit) if max(load) > good else []
    owner = np.repeat(ulysses_rank, row_work.shape[1]).reshape(row_work.shape)
    row_order = np.arange(row_work.shape[1]) if row_order is None else row_order
    for split in splits:
        _apply_split(row_work, owner, head_work_by_rank, split, row_order)
    # 3. Single rows of heads that are split anyway level what whole rows at the cuts left over.
    trade_single_rows(row_work, owner, head_work_by_rank, limit)
    if splits:  # a row without work must not be what keeps a head in a Ulysses rank
        idle = (row_work == 0) & (work > 0)[:, None]
        owner = np.where(idle, head_work_by_rank.argmax(axis=1)[:, None], owner)
    return owner


def _choose_splits(load: list[int], limit: int) -> list[HeadSplit]:
    """Returns the fewest cuts that bring every Ulysses rank down to `limit`.

    Args:
        load: Work per Ulysses rank, with whole heads.
    """
    if max(load) <= limit:
        return []
    mean = -(-sum(load) // len(load))
    slack = (limit - mean) // 4  # for whole rows
    tight, loose = _plan_splits(load, mean), _plan_splits(load, limit - slack)
    return loose if len(loose) < len(tight) else tight  # down to the mean, if that needs no more cuts


def _plan_splits(load: list[int], limit: int) -> list[HeadSplit]:
    """Returns cuts that leave no Ulysses rank above `limit`.

    The fullest Ulysses rank goes first, to the least room that takes all its surplus, else to the most room. Each cut
    either settles the rank it leaves or fills the rank it reaches, and the last does both: at most x − 1 cuts.
    """
    load = list(load)
    ranks = range(len(load))
    mean = -(-sum(load) // len(load))
    splits: list[HeadSplit] = []
    while len(splits) < len(load) - 1:
        full = max(ranks, key=load.__getitem__)
        surplus = load[full] - limit
        if surplus <= 0:
            break
        room = {c: limit - load[c] for c in ranks if load[c] < limit}
        enough = [c for c in room if room[c] >= surplus]
        target = min(enough, key=room.__getitem__) if enough else max(room, key=room.__getitem__)
        # within what the target takes, leave the source between `limit` and the mean, clear of both limits
        amount = min(load[full] - mean, (surplus + room[target]) // 2) if enough else room[target]
        load[full] -= amount
        load[target] += amount
        splits.append(HeadSplit(full, target, load[full]))
    return splits


def _apply_split(
    row_work: np.ndarray, owner: np.ndarray, head_work_by_rank: np.ndarray, split: HeadSplit, row_order: np.ndarray
) -> None:
    """Makes a cut in the source's largest head, as near to its level as whole rows allow. Changes both arrays.

    The rows are a run, and one more row that makes up for what whole rows at the run's end cannot. Levels are the
    source's, so that a head cut many times rounds each boundary to a row and the errors do not add up.
    """
    head = int(head_work_by_rank[:, split.source].argmax())
    wanted = int(head_work_by_rank[:, split.source].sum()) - split.level
    run = row_order[owner[head, row_order] == split.source]
    work = row_work[head, run]
    taken = np.concatenate([[0], np.cumsum(work)])  # work of the first 0, 1, 2, … rows
    last = int(np.searchsorted(taken, wanted, side="right"))  # the first `last` run lengths do not exceed the wish
    lengths = np.arange(max(0, last - 8), last)
    if len(lengths) == 0:
        return
    extra = np.concatenate([[0], work])
    error = np.abs(wanted - taken[lengths, None] - extra)
    error[:, 1:][np.arange(len(work)) < lengths[:, None]] = abs(wanted)  # already in the run
    length, one = divmod(int(error.argmin()), len(extra))
    amount = int(taken[lengths[length]] + extra[one])
    if head_work_by_rank[:, split.target].sum() + amount >= head_work_by_rank[:, split.source].sum():
        return  # rows too large to help
    chosen = np.append(run[: lengths[length]], run[one - 1 : one] if one else run[:0])
    owner[head, chosen] = split.target
    head_work_by_rank[head, split.source] -= amount
    head_work_by_rank[head, split.target] += amount


def contiguous_heads(heads: int, ulysses_degree: int) -> np.ndarray:
    """Heads in order, in runs as equal as they come (Ulysses).

    Returns:
        int64[H], the Ulysses rank of each head.
    """
    return np.arange(heads, dtype=np.int64) * ulysses_degree // heads


def snake_heads(work: np.ndarray, ulysses_degree: int) -> np.ndarray:
    """Heads by falling work, assigned back and forth: 0 1 2 2 1 0 0 1 2 …

    Args:
        work: int[H], dense blocks per head.

    Returns:
        int64[H], the Ulysses rank of each head.
    """
    turn, place = np.divmod(np.arange(len(work)), ulysses_degree)
    ulysses_rank = np.empty(len(work), dtype=np.int64)
    ulysses_rank[np.argsort(-work, kind="stable")] = np.where(turn % 2 == 0, place, ulysses_degree - 1 - place)
    return ulysses_rank


def greedy_heads(work: np.ndarray, ulysses_degree: int, cap: int | None = None) -> np.ndarray:
    """Largest head first, each to the Ulysses rank with the least work so far; ties go to the lower index.

    Args:
        work: int[H], dense blocks per head.
        cap: Most heads a Ulysses rank may take, or None for Alg. 1 as printed.

    Returns:
        int64[H], the Ulysses rank of each head.
    """
    if cap is not None and cap * ulysses_degree < len(work):
        least = -(-len(work) // ulysses_degree)
        raise ValueError(f"{len(work)} heads do not fit {ulysses_degree} ranks of at most {cap}; use cap ≥ {least}")
    load = [0] * ulysses_degree
    count = [0] * ulysses_degree
    ulysses_rank = np.empty(len(work), dtype=np.int64)
    for head in np.argsort(-work, kind="stable"):
        open_ranks = [c for c in range(ulysses_degree) if cap is None or count[c] < cap]
        best = min(open_ranks, key=load.__getitem__)
        ulysses_rank[head] = best
        load[best] += int(work[head])
        count[best] += 1
    return ulysses_rank
