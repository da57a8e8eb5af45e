"""Which strategy an attention is computed with (paper §4.3): the one predicted to be fastest for its mask.

Every rank predicts for itself, from the mask's bits and the constants of one file: all choose alike.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from dbsp_core.cost.hardware import Hardware
from dbsp_core.cost.latency import AttentionShape, Topology, predict
from dbsp_core.layout.sequence_layout import SequenceLayout
from dbsp_core.layout.strategy import Strategy
from dbsp_core.masks.grid import BlockGrid
from dbsp_core.planning.plan import Plan

__all__ = ["AUTO", "StrategySelector", "candidates"]

AUTO = "auto"
"""Stands where a strategy would, to leave the choice to `StrategySelector`."""


def candidates(world: int, grid: BlockGrid, merges: bool = True) -> tuple[Strategy, ...]:
    """Every UxRy of `world` ranks that the grid has KV blocks for; without rings where a kernel cannot merge."""
    return tuple(s for s in Strategy.all_for(world) if s.ring <= grid.nk and (merges or s.ring == 1))


@dataclass
class StrategySelector:
    """Plans every strategy, predicts each plan's time, and takes the fastest.

    layout:     the one layout of the forward pass, which plans of all strategies start from
    hysteresis: share of the predicted time that a change of strategy must save: what a change costs is not predicted
    chosen:     how often each strategy was
    """

    strategies: tuple[Strategy, ...]
    hardware: Hardware
    topology: Topology
    layout: SequenceLayout
    hysteresis: float = 0.02
    chosen: dict[Strategy, int] = field(default_factory=dict)

    def choose(self, make: Callable[[Strategy], Plan], shape: AttentionShape, current: Strategy | None) -> Plan:
        """The plan to use from now on. make: plans one strategy;  current: the strategy in use, None at first"""
        plans = {strategy: make(strategy) for strategy in self.strategies}
        seconds = {strategy: self.predict_ns(plan, shape) for strategy, plan in plans.items()}
        best = min(self.strategies, key=seconds.__getitem__)
        if current in seconds and seconds[current] * (1 - self.hysteresis) <= seconds[best]:
            best = current
        self.chosen[best] = self.chosen.get(best, 0) + 1
        return plans[best]

    def predict_ns(self, plan: Plan, shape: AttentionShape) -> int:
        """Whole nanoseconds: a last bit that differed between ranks could not make them choose differently."""
        return round(predict(plan, shape, self.hardware, self.topology, self.layout).total_s * 1e9)
