"""The planners: ours, the paper's, plain sequence parallelism and xDiT's; ρ_s and its bound. Only numpy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from dbsp_core.layout.strategy import Strategy
from dbsp_core.masks.grid import BlockGrid
from dbsp_core.planning.chunks import columns_of_heads
from dbsp_core.planning.heads import assign_heads, contiguous_heads, greedy_heads, snake_heads
from dbsp_core.planning.rows import level_rows, load_limit
from dbsp_core.utils.errors import UserError, in_short

KEY_PRICE = 2048
"""Scores that take as long as receiving one token's key and value of one head, where no kernel hides the receipt.

FLOP/s · (1 / bytes/s of an all-to-all + 1 / bytes/s of packing), for 2-byte elements: 4·D bytes a token come, and a
score takes 4·D FLOP. By the constants in configs/hardware: 1,850 on an H200, 1,953 on an H100, 2,157 on an A800
and 3,995 on an H800; docs/results/even.md shows how little plans differ between them.
"""
MOST_PRICE = 50
"""The price of a head is at most this part, a fiftieth, of a rank's mean work.

Short videos and single heads of a model would otherwise stay imbalanced for the sake of keys whose price is known to a
factor of two at best. By the same model of time that costs 1 % on average; see docs/results/even.md.
"""
COLUMN_SHARE = 0.5
"""Share of a hybrid's tolerance that its Ulysses ranks may take; the rest is for the rows of each."""
FEW_ROWS_A_RANK = 128
"""Rows with work for each rank, up to which rows may go to ranks that then receive the keys of another head.

Of more rows a rank has enough to be even without; measured, no plan of more than 112 gained by it.
"""


def head_price(grid: BlockGrid, strategy: Strategy) -> int:
    """Returns the active blocks that take as long as receiving one head's keys and values in the first all-to-all.

    It brings the chunk of a rank's own ring row, all but the rank's own part of it; kernels hide the later chunks.
    """
    x, y = strategy.ulysses, strategy.ring
    return KEY_PRICE * grid.tokens * (x - 1) // (grid.block_q * grid.block_k * x * y)


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
    small = items.astype(np.uint16) if items.max(initial=0) < 1 << 16 else items  # sorted by radix: much faster
    prefix = np.zeros(len(items) + 1, dtype=np.int64)
    np.cumsum(np.sort(small, kind="stable")[::-1], out=prefix[1:])
    bound = -(-total // bins)
    last = np.arange(0, len(items), bins)  # the k·bins + 1 largest are items[: last + 1]
    return max(bound, int((prefix[last + 1] - prefix[last - last // bins]).max(initial=0)))


def majority_rank(tokens_by_part: np.ndarray) -> np.ndarray:
    """Leaves each block with the part that holds most of its tokens; ties go to the lower index (Ring).

    Args:
        tokens_by_part: int[n, parts].

    Returns:
        int64[n].
    """
    return tokens_by_part.argmax(axis=1).astype(np.int64)


def balanced_majority_rank(tokens_by_part: np.ndarray) -> np.ndarray:
    """Assigns as `majority_rank` does, but no part gets more than its even share of blocks, rounded up.

    For blocks whose tokens lie scattered over all parts: the most tokens would be an accident, and the same for most.
    Blocks with most to lose choose first.

    Args:
        tokens_by_part: int[n, parts].

    Returns:
        int64[n].
    """
    blocks, parts = tokens_by_part.shape
    room = [-(-blocks // parts)] * parts
    preferences = np.argsort(-tokens_by_part, axis=1, kind="stable").tolist()
    part = np.empty(blocks, dtype=np.int64)
    for block in np.argsort(-tokens_by_part.max(axis=1), kind="stable").tolist():
        part[block] = next(preferred for preferred in preferences[block] if room[preferred])
        room[part[block]] -= 1
    return part


def biased_greedy(work: np.ndarray, parts: int, initial: np.ndarray, reward: float) -> np.ndarray:
    """Assigns the largest block first, each to the part with the least work so far, its initial part favoured.

    The load of a block's initial part counts `reward` · (the block's own work) less: §4.2.2 multiplies R_b by the
    block's count, where Alg. 1 prints a constant. Ties go to the lower index. reward 0 is the unbiased greedy. A block
    without work stays where it is: to move it would cost bytes and gain nothing.

    Args:
        work: int[n], active blocks that each block takes part in, summed over heads.
        initial: int[n], the part that holds each block before the exchange.

    Returns:
        int64[n], the part of each block.
    """
    load = [0] * parts
    part = np.empty(len(work), dtype=np.int64)
    for block in np.argsort(-work, kind="stable"):
        blocks, best = int(work[block]), int(initial[block])
        if blocks:
            biased: list[float] = [*load]
            biased[best] -= reward * blocks
            best = biased.index(min(biased))
        part[block] = best
        load[best] += blocks
    return part


@dataclass(frozen=True)
class Problem:
    """Input of a planner.

    Attributes:
        row_work: int64[H, nq], active blocks per (head, query block).
        q_ring_rank: int64[nq], ring rank that holds most of each query block; int64[H, nq] where heads have
            token orders of their own.
        price: Active blocks that take as long as receiving the keys of one head: `head_price`, or 0 if ranks are sent
            only the keys that their rows need, of which a split head adds few.
        position: float64[nq], mean position of each query block's tokens, if each rank is sent only the keys that its
            rows need; else None.
    """

    strategy: Strategy
    row_work: np.ndarray
    q_ring_rank: np.ndarray
    price: int = 0
    position: np.ndarray | None = None


@dataclass(frozen=True)
class Planner:
    """A way to assign rows to ranks.

    Attributes:
        assign: Returns int64[H, nq], the owner of each row: ring rank · x + Ulysses rank.
        layout: The sequence layout it is meant for: where blocks are when nothing else is asked for.
    """

    assign: Callable[[Problem], np.ndarray]
    layout: str = "contiguous"


def contiguous(problem: Problem) -> np.ndarray:
    """Plans plain Ulysses, Ring and USP: heads in equal runs, blocks with the ring rank that holds them."""
    column = contiguous_heads(len(problem.row_work), problem.strategy.ulysses)
    return _whole_heads(column, problem.q_ring_rank, problem)


def snake(problem: Problem) -> np.ndarray:
    """Plans xDiT's head balancing: heads, densest first, back and forth in equal numbers; no block migrates."""
    column = snake_heads(problem.row_work.sum(axis=1), problem.strategy.ulysses)
    return _whole_heads(column, problem.q_ring_rank, problem)


def paper(problem: Problem, reward: float = 1.0, equal_heads: bool = False) -> np.ndarray:
    """Runs Alg. 1: greedy heads, then biased greedy query blocks on counts summed over heads.

    What it does with KV blocks balances ring steps, for which nobody waits here: they come from where they live.

    Args:
        reward: R_b ≥ 0 of its biased greedy assignment: how strongly blocks are held where they are.
        equal_heads: True if no Ulysses rank may get more than ceil(H / x) heads.
    """
    if not reward >= 0:
        raise UserError(f"reward={reward} must not be negative; 0 balances without regard to where blocks are")
    x, y, work, initial = problem.strategy.ulysses, problem.strategy.ring, problem.row_work, problem.q_ring_rank
    cap = -(-len(work) // x) if equal_heads else None
    if initial.ndim == 2:  # heads differ: the ring rank of most of them, ties to the lower
        initial = (initial[:, :, None] == np.arange(initial.max() + 1)).sum(axis=0).argmax(axis=1)
    ring_rank = biased_greedy(work.sum(axis=0), y, initial, reward)
    return _whole_heads(greedy_heads(work.sum(axis=1), x, cap), ring_rank, problem)


def _whole_heads(column: np.ndarray, ring_rank: np.ndarray, problem: Problem) -> np.ndarray:
    """Returns int64[H, nq], owners, from int64[H] Ulysses ranks, and int64[nq] or int64[H, nq] ring ranks."""
    return ring_rank * problem.strategy.ulysses + column[:, None]


def dbsp(problem: Problem) -> np.ndarray:
    """Ours: heads whole or split as is faster, few rows moved."""
    x, y = problem.strategy.ulysses, problem.strategy.ring
    return plan_rows(problem.row_work, problem.q_ring_rank, x, y, problem.price, problem.position)


def plan_rows(
    work: np.ndarray,
    q_ring_rank: np.ndarray,
    ulysses: int,
    ring: int,
    price: int = 0,
    position: np.ndarray | None = None,
    target_rho: float = 1.002,
) -> np.ndarray:
    """Assigns rows so that the slowest rank computes and receives the least, and most rows stay where they are.

    A rank's time is its rows' work and a price for each head of its Ulysses rank.

    Args:
        work: int64[H, nq], active blocks of each row.
        q_ring_rank: int64[nq] or int64[H, nq], the ring rank that holds most of each query block.
        ulysses: x, the number of Ulysses ranks, among which heads are distributed.
        ring: y, the number of ring ranks, among which the rows of a head are.
        price: Active blocks that take as long as receiving the keys and values of one head; see also `MOST_PRICE`.
        position: float64[nq], where query blocks are in the order of tokens. Given, each Ulysses rank's rows are cut
            into runs of it instead of staying where they are: rows near one another need much the same keys.
        target_rho: ρ_s at which to stop.

    Returns:
        int64[H, nq], the owner of each row: ring rank · x + Ulysses rank.
    """
    world, total, heaviest = ulysses * ring, int(work.sum()), int(work.max(initial=0))
    limit = max(heaviest, load_limit(total, world, target_rho))
    price = min(price, total // (MOST_PRICE * world))
    # 1. Heads to Ulysses ranks.
    order = _interleaved(q_ring_rank, ring) if position is None else np.argsort(position, kind="stable")
    share = 1 if ring == 1 else COLUMN_SHARE
    column = assign_heads(work, ulysses, 1 + share * (target_rho - 1), order, price * ring)
    # 2. Each Ulysses rank's rows to its ring ranks.
    if position is not None:
        ring_rank = _runs_by_column(work, column, order, ulysses, ring)
    else:
        ring_rank = np.array(np.broadcast_to(q_ring_rank, work.shape))
        for ulysses_rank in range(ulysses if ring > 1 else 0):
            rows = column == ulysses_rank
            good = max(limit, -(-int(work[rows].sum()) // ring))
            ring_rank[rows] = level_rows(work[rows], ring_rank[rows], ring, good)
    owner = ring_rank * ulysses + column
    # 3. While ranks are still imbalanced, rows go to any rank: many may if keys cost nothing, else few.
    if work_by_rank(owner, work, world).max() <= limit or (price and np.count_nonzero(work) > FEW_ROWS_A_RANK * world):
        return owner
    times = rank_times(work, owner, ulysses, ring, price)
    if times.max() - int(times.sum()) // world <= price:
        return owner
    levelled = level_rows(work.ravel(), owner.ravel(), world, limit).reshape(work.shape)
    return levelled if rank_times(work, levelled, ulysses, ring, price).max() < times.max() else owner


def rank_times(work: np.ndarray, owner: np.ndarray, ulysses: int, ring: int, price: int) -> np.ndarray:
    """Returns int64[P], what each rank computes and receives before its first kernel, in active blocks."""
    received = np.tile(columns_of_heads(owner, ulysses).sum(axis=0), ring)
    times: np.ndarray = work_by_rank(owner, work, ulysses * ring) + price * received
    return times


def _runs_by_column(work: np.ndarray, owner: np.ndarray, order: np.ndarray, ulysses: int, ring: int) -> np.ndarray:
    """Returns int64[H, nq], ring ranks of rows: each column's in runs of equal work, all of its heads side by side."""
    by_block = np.ascontiguousarray(work[:, order].T)  # block by block, all heads of a block together
    columns = owner[:, order].T
    ring_ranks = np.zeros(by_block.shape, dtype=np.int64)
    for column in range(ulysses):
        here = columns == column
        of_column = by_block[here]
        of_column = of_column if of_column.any() else np.ones_like(of_column)
        middle = np.cumsum(of_column) - (of_column + 1) // 2
        ring_ranks[here] = np.minimum(middle * ring // int(of_column.sum() or 1), ring - 1)
    positions = np.empty(work.shape, dtype=np.int64)
    positions[:, order] = ring_ranks.T
    return positions


def _interleaved(q_ring_rank: np.ndarray, ring: int) -> np.ndarray:
    """Returns int64[nq], query blocks with ring ranks interleaved: a run takes equally from each.

    If ring ranks differ between heads, the order is the first head's: it only decides how balanced the start is.
    """
    q_ring_rank = q_ring_rank if q_ring_rank.ndim == 1 else q_ring_rank[0]
    turn = np.empty(len(q_ring_rank), dtype=np.int64)
    for rank in range(ring):
        mine = q_ring_rank == rank
        turn[mine] = np.arange(mine.sum())
    return np.argsort(turn, kind="stable")


PLANNERS = {
    "dbsp": Planner(dbsp, layout="striped"),
    "contiguous": Planner(contiguous),
    "snake": Planner(snake),
    "paper": Planner(paper),
}


def require_planner(name: str) -> Planner:
    """Returns the planner of that name. Raises UserError when there is none."""
    if name not in PLANNERS:
        raise UserError(f"unknown planner {in_short(name)}; use one of {', '.join(PLANNERS)}")
    return PLANNERS[name]
