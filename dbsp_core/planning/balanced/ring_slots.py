"""Ring slots of KV blocks: equal work in every slot, the fewest (head, KV block) pieces moved. Only numpy.

In each ring step a slot's keys are with other ranks, so no assignment of rows makes up for a slot that has more than
its share: ρ_s ≥ y · (work of the fullest slot) / T. Slots are therefore levelled first. A piece is one head's KV
block. Moving it alone costs 1/H of moving the block for all heads, and what is missing is seldom a whole block.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right

import numpy as np

__all__ = ["balance_slots"]


def balance_slots(
    kv_block_work: np.ndarray, slot: np.ndarray, group: np.ndarray, ring: int, target_rho: float = 1.001
) -> np.ndarray:
    """Moves the fewest pieces between slots that bring every slot of every group of heads near the group's mean.

    Args:
        kv_block_work: int[H, nk], dense blocks per (head, KV block).
        slot: int[nk] or int[H, nk], slot of each block now.
        group: int[H]; heads of one group, those that one Ulysses rank computes, are levelled together.

    Returns:
        int64[H, nk], the slot of each piece.
    """
    slots = np.array(np.broadcast_to(slot, kv_block_work.shape), dtype=np.int64, order="C")
    for one in range(int(group.max()) + 1):
        heads = np.flatnonzero(group == one)
        weight, where = kv_block_work[heads], slots[heads]
        loads = np.bincount(where.ravel(), weights=weight.ravel(), minlength=ring).astype(np.int64).tolist()
        limit = max(-(-sum(loads) // ring), int(sum(loads) * target_rho) // ring)
        for source in np.argsort(loads, kind="stable")[::-1].tolist():
            if loads[source] > limit:
                pieces = np.flatnonzero((where == source) & (weight > 0))
                for piece, target in _shed(weight.ravel()[pieces], source, loads, limit):
                    head, block = divmod(int(pieces[piece]), kv_block_work.shape[1])
                    slots[heads[head], block] = target
    return slots


def _shed(weight: np.ndarray, source: int, loads: list[int], limit: int) -> list[tuple[int, int]]:
    """Brings slot `source` down to `limit` with the fewest of its pieces, each to the slot with the most room.

    The lightest piece that settles everything is taken if there is one, else the heaviest that fits.

    Args:
        weight: int[n], work of the pieces in `source`.
        loads: Work per slot, kept up to date.

    Returns:
        (piece, target slot) of each move.
    """
    surplus = loads[source] - limit
    some = min(len(weight), 64 + 4 * int(surplus * len(weight) // max(1, weight.sum())))
    key = weight.max(initial=0) - weight
    order = np.argsort(key.astype(np.uint16) if key.max(initial=0) < 1 << 16 else key, kind="stable")  # by radix
    shown = np.concatenate([order[:some], order[some :: max(1, len(order) // 128)]])[::-1]  # lightest first
    piece, size = shown.tolist(), weight[shown].tolist()
    moves = []
    while loads[source] > limit and piece:
        target = min(range(len(loads)), key=loads.__getitem__)
        room = limit - loads[target]
        at = bisect_left(size, loads[source] - limit)
        if at == len(size) or size[at] > room:
            at = bisect_right(size, room) - 1
        if at < 0:
            break
        moved = size.pop(at)
        moves.append((piece.pop(at), target))
        loads[source] -= moved
        loads[target] += moved
    return moves
