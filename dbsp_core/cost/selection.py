"""Which strategy an attention is computed with (paper §4.3): the one predicted to be fastest for its mask.

Every rank predicts for itself, from the mask's bits and the constants of one file: all choose alike. Without constants
a rule chooses, by the numbers of heads and of ranks per node.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from dbsp_core.cost.machine import Hardware
from dbsp_core.cost.prediction import AttentionShape, Prediction, Topology, predict
from dbsp_core.layout.sequence_layout import SequenceLayout
from dbsp_core.layout.strategy import Strategy
from dbsp_core.masks.grid import BlockGrid
from dbsp_core.planning.plan import Plan

__all__ = ["AUTO", "StrategySelector", "by_rule", "candidates", "in_ns"]

AUTO = "auto"
"""Leaves the choice of a strategy to `StrategySelector`."""


def by_rule(strategies: Sequence[Strategy], heads: int, topology: Topology) -> list[Strategy]:
    """Returns the strategies with the best first, by a rule that needs no constants.

    As many ranks as possible share out heads, as long as each has one and they are on one node: an all-to-all sends
    less than a ring, has one kernel launch and no merge, and crosses no network. Rings join nodes. Strategies that
    share out heads beyond a node, or to more ranks than there are heads, come last.
    """

    def rank(strategy: Strategy) -> tuple[bool, int]:
        nodes = topology.nodes.reshape(strategy.ring, strategy.ulysses)
        fits = strategy.ulysses <= heads and bool((nodes == nodes[:, :1]).all())
        return not fits, -strategy.ulysses if fits else strategy.ulysses

    return sorted(strategies, key=rank)


def candidates(world: int, grid: BlockGrid, merges: bool = True) -> tuple[Strategy, ...]:
    """Every UxRy of `world` ranks that the grid has KV blocks for; without rings where a kernel cannot merge."""
    return tuple(s for s in Strategy.all_for(world) if s.ring <= grid.nk and (merges or s.ring == 1))


def in_ns(prediction: Prediction) -> int:
    """Whole nanoseconds: a last bit that differed between ranks could not make them choose differently."""
    return round(prediction.total_s * 1e9)


@dataclass
class StrategySelector:
    """Plans every strategy, predicts each plan's time, and takes the fastest.

    Attributes:
        hardware: Whose constants predict times; None: strategies are taken `by_rule`.
        layout: The one layout of the forward pass, which plans of all strategies start from.
        hysteresis: Share of the predicted time that a change of strategy must save: what a change costs is not
            predicted.
        chosen: How often each strategy was.
    """

    strategies: tuple[Strategy, ...]
    hardware: Hardware | None
    topology: Topology
    layout: SequenceLayout
    hysteresis: float = 0.02
    chosen: dict[Strategy, int] = field(default_factory=dict)

    def choose(
        self,
        make: Callable[[Strategy], Plan],
        shape: AttentionShape,
        current: Strategy | None,
    ) -> Plan:
        """The plan to use from now on.

        Args:
            make: Plans one strategy.
            current: The strategy in use, None at first.
        """
        if self.hardware is None:
            best = by_rule(self.strategies, shape.heads, self.topology)[0]
            self.chosen[best] = self.chosen.get(best, 0) + 1
            return make(best)
        plans = {strategy: make(strategy) for strategy in self.strategies}
        known, topology, layout = self.hardware, self.topology, self.layout
        seconds = {one: in_ns(predict(plan, shape, known, topology, layout)) for one, plan in plans.items()}
        best = min(seconds, key=seconds.__getitem__)
        if current in seconds and seconds[current] * (1 - self.hysteresis) <= seconds[best]:
            best = current
        self.chosen[best] = self.chosen.get(best, 0) + 1
        return plans[best]
