"""The sparse imbalance ratio ρ_s (paper §3.2) of ranks' totals, and what no plan can beat. Only numpy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from dbsp_core.layout.strategy import Strategy
from dbsp_core.planning.heads import contiguous_heads, greedy_heads, snake_heads
from dbsp_core.planning.rows import plan_rows
from dbsp_core.utils.errors import UserError, bad_value, blame_setting, in_short, why_removed

__all__ = [
    "PLANNERS",
    "PaperConfig",
    "Planner",
    "PlannerConfig",
    "Problem",
    "balanced_majority_rank",
    "biased_greedy",
    "bins_bound",
    "imbalance_ratio",
    "majority_rank",
    "require_planner",
    "rho_bound",
    "work_by_rank",
]


def work_by_rank(owner: np.ndarray, row_work: np.ndarray, world: int) -> np.ndarray:
    """int64[P]: dense blocks of each rank, from int64[H, nq] each: the rows' ranks, and dense blocks."""
    return np.bincount(owner.ravel(), row_work.ravel(), world).astype(np.int64)


def imbalance_ratio(work: np.ndarray) -> float:
    """ρ_s: the slowest rank's work over the mean, from int64[P]. No work at all is balanced: 1.0."""
    total = int(work.sum())
    return int(work.max()) * len(work) / total if total else 1.0


def rho_bound(row_work: np.ndarray, world: int) -> float:
    """ρ_s ≥ 1 that no plan of whole rows can beat, from int64[H, nq] dense blocks of each row."""
    total = int(row_work.sum())
    return bins_bound(row_work.ravel(), world) * world / total if total else 1.0


def bins_bound(items: np.ndarray, bins: int) -> int:
    """Least possible load of the fullest of `bins` bins when `items` (int[n]) are packed whole.

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
    """Each block stays with the part that holds most of its tokens; ties go to the lower index (Ring).

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
    """Largest block first, each to the part with the least work so far, its initial part favoured.

    The load of a block's initial part counts `reward` · (the block's own work) less: §4.2.2 multiplies R_b by the
    block's count, where Alg. 1 prints a constant. Ties go to the lower index. reward 0 is the unbiased greedy. A block
    without work stays where it is: to move it would cost bytes and gain nothing.

    Args:
        work: int[n], dense blocks that each block takes part in, summed over heads.
        initial: int[n], the part that holds each block before the exchange.

    Returns:
        int64[n], the part of each block.
    """
    load = [0] * parts
    part = np.empty(len(work), dtype=np.int64)
    for block in np.argsort(-work, kind="stable"):
        own = int(work[block])
        home = int(initial[block])
        best = home if own == 0 else min(range(parts), key=lambda p: load[p] - (reward * own if p == home else 0))
        part[block] = best
        load[best] += own
    return part


@dataclass(frozen=True)
class PaperConfig:
    """Settings of planner "paper" alone.

    Attributes:
        reward: R_b ≥ 0 of its biased greedy assignment: how strongly blocks are held where they are.
        equal_heads: Whether no Ulysses rank gets more than ceil(H / x) heads.
    """

    reward: float = 1.0
    equal_heads: bool = False

    def __post_init__(self) -> None:
        if not self.reward >= 0:
            complaint = "must not be negative; 0 balances without regard to where blocks are"
            raise bad_value(self, "reward", complaint, "planner.paper.")


@dataclass(frozen=True)
class PlannerConfig:
    """A planner's name and settings. Raises SettingError for values out of range.

    Attributes:
        name: From `PLANNERS`: "dbsp" (ours), "paper" (Alg. 1), "contiguous", and others.
        target_rho: ρ_s at which planner "dbsp" stops balancing. None: 1.002, but without a ring heads are only split
            above 1.01.
    """

    name: str = "dbsp"
    target_rho: float | None = None
    paper: PaperConfig = field(default_factory=PaperConfig)

    def __post_init__(self) -> None:
        with blame_setting("name"):
            require_planner(self.name)
        if self.target_rho is not None and not self.target_rho >= 1:
            raise bad_value(self, "target_rho", "must be at least 1, the least ρ_s there is", "planner.")


@dataclass(frozen=True)
class Problem:
    """What a planner may look at.

    Attributes:
        row_work: int64[H, nq], dense blocks per (head, query block).
        home: int64[nq], ring rank that holds most of each query block outside attention; int64[H, nq] where heads have
            token orders of their own.
        position: float64[nq], mean position of each query block's tokens, if each rank is sent only the keys that its
            rows need; else None.
    """

    strategy: Strategy
    row_work: np.ndarray
    home: np.ndarray
    position: np.ndarray | None = None


@dataclass(frozen=True)
class Planner:
    """How rows are assigned.

    Attributes:
        assign: Returns int64[H, nq], the owner of each row.
        layout: The sequence layout it is meant for: where blocks are when nothing else is asked for.
    """

    assign: Callable[[Problem, PlannerConfig], np.ndarray]
    layout: str = "contiguous"


def contiguous(problem: Problem, config: PlannerConfig) -> np.ndarray:
    """Ulysses, Ring and USP as they are: heads in equal runs, blocks where they live."""
    return _whole_heads(contiguous_heads(len(problem.row_work), problem.strategy.ulysses), problem.home, problem)


def snake(problem: Problem, config: PlannerConfig) -> np.ndarray:
    """xDiT's head balancing: heads, densest first, back and forth in equal numbers; blocks where they live."""
    return _whole_heads(snake_heads(problem.row_work.sum(axis=1), problem.strategy.ulysses), problem.home, problem)


def paper(problem: Problem, config: PlannerConfig) -> np.ndarray:
    """Alg. 1: greedy heads, then biased greedy query blocks on counts summed over heads.

    What it does with KV blocks balances ring steps, for which nobody waits here: they come from where they live.
    """
    x, y, told, work = problem.strategy.ulysses, problem.strategy.ring, config.paper, problem.row_work
    cap = -(-len(work) // x) if told.equal_heads else None
    ring_rank = biased_greedy(work.sum(axis=0), y, _of_most_heads(problem.home), told.reward)
    return _whole_heads(greedy_heads(work.sum(axis=1), x, cap), ring_rank, problem)


def _whole_heads(column: np.ndarray, ring_rank: np.ndarray, problem: Problem) -> np.ndarray:
    """int64[H, nq]: ring rank · x + Ulysses rank, from int64[H], and int64[nq] or int64[H, nq]."""
    return ring_rank * problem.strategy.ulysses + column[:, None]


def _of_most_heads(home: np.ndarray) -> np.ndarray:
    """int64[n]: one home per block, the most common where heads differ; ties go to the lower rank."""
    if home.ndim == 1:
        return home
    return (home[:, :, None] == np.arange(home.max() + 1)).sum(axis=0).argmax(axis=1)


def dbsp(problem: Problem, config: PlannerConfig) -> np.ndarray:
    """Ours: whole heads and the fewest splits, single rows moved; see `planning.rows`."""
    target, ulysses, ring = config.target_rho, problem.strategy.ulysses, problem.strategy.ring
    told = {} if target is None else {"target_rho": target, "whole_rho": target}
    return plan_rows(problem.row_work, problem.home, ulysses, ring, position=problem.position, **told)


PLANNERS = {
    "dbsp": Planner(dbsp, layout="striped"),
    "contiguous": Planner(contiguous),
    "snake": Planner(snake),
    "paper": Planner(paper),
}


def require_planner(name: str) -> Planner:
    """The planner of that name. Raises UserError when there is none."""
    if name not in PLANNERS:
        unknown = f"unknown planner {in_short(name)}; use one of {', '.join(PLANNERS)}"
        raise UserError(why_removed("planner", name) or unknown)
    return PLANNERS[name]
