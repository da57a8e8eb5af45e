"""Setting `planner`: a planner's name, or a mapping with its options."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from dbsp_core.planning.planners import Problem, paper, require_planner
from dbsp_core.utils.errors import UserError, require_value
from dbsp_core.utils.schema import convert


@dataclass(frozen=True)
class PlannerConfig:
    """A planner and its options. Raises UserError for options that it does not have."""

    name: str = "dbsp"  # One of `dbsp_core.planning.planners.PLANNERS`
    # R_b of `paper`: how strongly blocks stay on their rank. None: 1; the authors' scripts use 2.
    reward: float | None = None

    def __post_init__(self) -> None:
        require_planner(self.name)
        if self.reward is not None and self.name != "paper":
            raise UserError(f"planner {self.name!r} has no reward; remove it, or use planner paper")
        require_value(self, "reward", (self.reward or 0) >= 0, "must not be negative; 0 moves blocks freely")

    @property
    def setting(self) -> PlannerLike:
        """The value of setting `planner`."""
        return self.name if self.reward is None else {"name": self.name, "reward": self.reward}

    @property
    def assign(self) -> Callable[[Problem], np.ndarray]:
        return require_planner(self.name).assign if self.reward is None else partial(paper, reward=self.reward)

    @property
    def layout(self) -> str:
        return require_planner(self.name).layout


PlannerLike = str | Mapping[str, Any] | PlannerConfig
"""A name in `PLANNERS`, a mapping such as {"name": "paper", "reward": 2}, or a `PlannerConfig`."""
DEFAULT_PLANNER = PlannerConfig()


def read_planner(value: Any, name: str = "planner") -> PlannerConfig:
    """Reads a `PlannerLike`. Raises UserError, naming the setting `name`, for anything else."""
    read: PlannerConfig = convert({"name": value} if isinstance(value, str) else value, PlannerConfig, name, "planner")
    return read
