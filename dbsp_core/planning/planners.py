"""The planners: ours, the paper's, plain sequence parallelism, and xDiT's order of heads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from dbsp_core.layout.strategy import Strategy
from dbsp_core.planning.balanced.planner import plan_rows
from dbsp_core.planning.balanced.row_cuts import cut_rows
from dbsp_core.planning.baselines import (
    assign_whole_heads,
    biased_greedy,
    contiguous_assignment,
    greedy_heads,
    snake_heads,
)
from dbsp_core.planning.bounds import whole_block_bound, whole_row_bound
from dbsp_core.planning.planner_input import PlannerInput
from dbsp_core.utils.errors import UserError, bad_value, blame_setting, in_short
from dbsp_core.utils.removed import why_removed

__all__ = ["PLANNERS", "OwnersAndSlots", "PaperConfig", "Planner", "PlannerConfig", "require_planner"]

RING_TOLERANCE, HEAD_TOLERANCE = 1.005, 1.002

OwnersAndSlots = tuple[np.ndarray, np.ndarray]
"""(int64[H, nq] owner of each row, int64[H, nk] slot of each KV block)"""


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
        target_rho: ρ_s at which planner "dbsp" stops balancing; None: 1.002 for only Ulysses, 1.005 with a ring.
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
class Planner:
    """How work is assigned, and what bounds it.

    Attributes:
        granularity_bound: ρ_s that no plan of this granularity can beat, from row work, KV-block work, x and y.
        layout: The sequence layout it is meant for: where blocks are when nothing else is asked for.
        heeds_cap: Whether `PaperConfig.equal_heads` binds it.
    """

    assign: Callable[[PlannerInput, PlannerConfig], OwnersAndSlots]
    granularity_bound: Callable[..., float] = whole_block_bound
    layout: str = "contiguous"
    heeds_cap: bool = False

    def bound(
        self, row_work: np.ndarray, kv_block_work: np.ndarray, strategy: Strategy, config: PlannerConfig
    ) -> float:
        """ρ_s that no plan of this kind can beat; see `PlannerInput` for the arrays."""
        capped = {"equal_heads": True} if config.paper.equal_heads and self.heeds_cap else {}
        return self.granularity_bound(row_work, kv_block_work, strategy.ulysses, strategy.ring, **capped)


def contiguous(inputs: PlannerInput, config: PlannerConfig) -> OwnersAndSlots:
    """Ulysses, Ring and USP as they are: heads in equal runs, blocks where they live."""
    return contiguous_assignment(inputs.heads, inputs.q_home, inputs.k_home, inputs.strategy.ulysses)


def snake(inputs: PlannerInput, config: PlannerConfig) -> OwnersAndSlots:
    """xDiT's head balancing: heads, densest first, back and forth in equal numbers; blocks where they live."""
    ulysses_rank = snake_heads(inputs.row_work.sum(axis=1), inputs.strategy.ulysses)
    return assign_whole_heads(ulysses_rank, inputs.q_home, inputs.k_home, inputs.strategy.ulysses)


def paper(inputs: PlannerInput, config: PlannerConfig) -> OwnersAndSlots:
    """Alg. 1: greedy heads, then biased greedy blocks for Q and for K, V on counts summed over heads."""
    x, y, told = inputs.strategy.ulysses, inputs.strategy.ring, config.paper
    cap = -(-inputs.heads // x) if told.equal_heads else None
    ulysses_rank = greedy_heads(inputs.row_work.sum(axis=1), x, cap)
    q_ring = biased_greedy(inputs.row_work.sum(axis=0), y, _of_most_heads(inputs.q_home), told.reward)
    slot = biased_greedy(inputs.kv_block_work.sum(axis=0), y, _of_most_heads(inputs.k_home), told.reward)
    return assign_whole_heads(ulysses_rank, q_ring, slot, x)


def _of_most_heads(home: np.ndarray) -> np.ndarray:
    """int64[n]: one home per block, the most common where heads differ; ties go to the lower rank."""
    if home.ndim == 1:
        return home
    return (home[:, :, None] == np.arange(home.max() + 1)).sum(axis=0).argmax(axis=1)


def dbsp(inputs: PlannerInput, config: PlannerConfig) -> OwnersAndSlots:
    """Ours: whole heads and the fewest splits, level slots, single rows moved; see `planning.balanced.planner`.

    Where ranks are sent needed keys alone, rows are cut into runs of tokens instead; see `planning.balanced.row_cuts`.
    """
    if inputs.q_position is not None:
        target_rho = config.target_rho or HEAD_TOLERANCE
        owner = cut_rows(inputs.row_work, inputs.q_position, inputs.strategy.ulysses, inputs.strategy.ring, target_rho)
        return owner, np.array(np.broadcast_to(inputs.k_home, inputs.kv_block_work.shape))
    ring, heads = config.target_rho or RING_TOLERANCE, config.target_rho or HEAD_TOLERANCE
    return plan_rows(inputs, target_rho=ring, head_target_rho=heads)


PLANNERS = {
    "dbsp": Planner(dbsp, granularity_bound=whole_row_bound, layout="striped"),
    "contiguous": Planner(contiguous),
    "snake": Planner(snake),
    "paper": Planner(paper, heeds_cap=True),
}


def require_planner(name: str) -> Planner:
    """The planner of that name. Raises UserError when there is none."""
    if name not in PLANNERS:
        unknown = f"unknown planner {in_short(name)}; use one of {', '.join(PLANNERS)}"
        raise UserError(why_removed("planner", name) or unknown)
    return PLANNERS[name]
