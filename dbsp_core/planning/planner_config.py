"""The setting `planner`: a planner's name, or a mapping with what it may be told."""

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
    """A planner with a setting of its own. Raises UserError for one that it does not have.

    Attributes:
        name: One of `dbsp_core.planning.planners.PLANNERS`.
        reward: R_b of `paper`: how strongly blocks are held where they are. None: 1; the authors' scripts have 2.
    """

    name: str = "dbsp"
    reward: float | None = None

    def __post_init__(self) -> None:
        require_planner(self.name)
        if self.reward is not None and self.name != "paper":
            raise UserError(f"planner {self.name!r} has no reward; leave it out, or take planner paper, which has")
        require_value(self, "reward", (self.reward or 0) >= 0, "must not be negative; 0 moves blocks freely")

    @property
    def setting(self) -> PlannerLike:
        """The setting `planner` that means it."""
        return self.name if self.reward is None else {"name": self.name, "reward": self.reward}

    @property
    def assign(self) -> Callable[[Problem], np.ndarray]:
        """`Planner.assign` with the reward."""
        return require_planner(self.name).assign if self.reward is None else partial(paper, reward=self.reward)

    @property
    def layout(self) -> str:
        """`Planner.layout`."""
        return require_planner(self.name).layout


PlannerLike = str | Mapping[str, Any] | PlannerConfig
"""A name of `PLANNERS`, {"name": "paper", "reward": 2}, or what was read of either."""
DEFAULT_PLANNER = PlannerConfig()


def read_planner(value: Any, name: str = "planner") -> PlannerConfig:
    """Reads a `PlannerLike`. Raises UserError for anything else, called `name`."""
    read: PlannerConfig = convert({"name": value} if isinstance(value, str) else value, PlannerConfig, name, "planner")
    return read
