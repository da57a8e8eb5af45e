"""Which strategy an attention is computed with (paper §4.3): the one predicted to be fastest for its mask.

Every rank predicts for itself, from the mask's bits and the constants of one file: all choose alike. Without constants
a rule chooses, by the numbers of heads and of ranks per node.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from dbsp_core.cost.comm_volume import traffic_of
from dbsp_core.cost.hardware import Hardware
from dbsp_core.cost.latency import AttentionShape, Prediction, Topology, predict
from dbsp_core.layout.sequence_layout import SequenceLayout
from dbsp_core.layout.strategy import Strategy
from dbsp_core.masks.block_mask import BlockMask
from dbsp_core.masks.grid import BlockGrid
from dbsp_core.planning.plan import Plan

__all__ = ["AUTO", "StrategySelector", "by_rule", "candidates", "fastest_plan", "in_fastest_chunks", "in_ns"]

WORTH_A_LOOK = 0.005
"""Share of the predicted time that other plans must be able to save before they are made."""
SHARES = ((1,), (1, 1), (2, 1), (1, 1, 1), (3, 2, 1), (1, 1, 1, 1))
"""Further chunks that are tried, all fetched at once: see `KeysInChunks.shares`."""
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


def fastest_plan(
    make: Callable[[str, bool], Plan],
    shape: AttentionShape,
    hardware: Hardware,
    topology: Topology,
    layout: SequenceLayout,
) -> Plan:
    """Planner "dbsp"'s plan, or a simpler planner's for the same mask, strategy and layout that is predicted faster.

    "dbsp" weighs an exchange by its bytes on average; the latency model knows which rank has most of them. Others are
    made only where they could save more than `WORTH_A_LOOK`: by even work, hidden P2P and an exchange without excess.

    Args:
        make: By planner, and whether Ulysses ranks must have equal numbers of heads.
    """

    plan = make("dbsp", False)
    if not topology.one_node and hardware.constants.network_bytes_per_s is None:  # nothing can be predicted
        return plan
    predicted, known, x = predict(plan, shape, hardware, topology, layout), hardware.constants, plan.strategy.ulysses
    share_s = shape.heads * shape.tokens / topology.world / known.exchange_bytes_per_s  # for each byte of a token
    sent = 3 * shape.sent_bytes(plan.assignment.wire) + shape.token_bytes
    least_exchange_s = 2 * known.exchange_latency_s + sent * share_s * (x - 1) / x  # nothing between ring ranks
    times = predicted.times
    gain_s = times.attention_s - times.even_compute_s + predicted.exchange_s - least_exchange_s
    if gain_s <= WORTH_A_LOOK * predicted.total_s:
        return plan
    others = [make("paper", True), *(make(planner, False) for planner in ("paper", "snake", "contiguous"))]
    return min([plan, *others], key=lambda one: in_ns(predict(one, shape, hardware, topology, layout)))


def in_fastest_chunks(
    plan: Plan,
    mask: BlockMask,
    shape: AttentionShape,
    hardware: Hardware | None,
    topology: Topology,
    layout: SequenceLayout,
) -> Plan:
    """A plan with its keys in those chunks of `SHARES` that are predicted to be fastest.

    A plan whose keys do not come in chunks stays as it is.

    Args:
        hardware: Whose constants predict times; None: one chunk.
    """
    keys = plan.assignment.keys
    if not keys.chunked:
        return plan
    shares = SHARES[0]
    if hardware is not None and (topology.one_node or hardware.constants.network_bytes_per_s is not None):
        traffic = traffic_of(plan.assignment, layout)

        def about_ns(shares: tuple[int, ...]) -> int:
            about = _about(plan, shares)
            return in_ns(predict(about, shape, hardware, topology, layout, traffic.in_chunks(shares)))

        shares = min(SHARES, key=about_ns)
    return plan.with_keys(keys.in_chunks(shares), mask)


def _about(plan: Plan, shares: tuple[int, ...]) -> Plan:
    """Nearly the plan in other chunks, in microseconds: as if the work with all keys of other ring rows were alike."""
    work = plan.metrics.work
    part = np.array(shares)[:, None] / sum(shares)
    metrics = replace(plan.metrics, work=np.concatenate([work[:1], part * work[1:].sum(axis=0)]))
    return replace(plan, metrics=metrics)


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
