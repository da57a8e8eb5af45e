"""The planners: ours, the paper's, plain sequence parallelism, and xDiT's order of heads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from dbsp_core.layout.strategy import Strategy
from dbsp_core.planning.baselines import biased_greedy, contiguous_heads, greedy_heads, snake_heads
from dbsp_core.planning.rows import plan_rows
from dbsp_core.utils.errors import UserError, bad_value, blame_setting, in_short
from dbsp_core.utils.removed import why_removed

__all__ = ["PLANNERS", "PaperConfig", "Planner", "PlannerConfig", "Problem", "require_planner"]


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
