"""Sequence layouts for needed keys: the token order whose runs of rows need least of other ranks; and whether to have
such a layout at all, which must be settled before any attention is reached."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from dbsp_core.cost.comm_volume import traffic_of
from dbsp_core.cost.hardware import Hardware
from dbsp_core.cost.latency import AttentionShape, Topology, predict
from dbsp_core.cost.selection import by_rule, in_ns
from dbsp_core.layout.sequence_layout import SequenceLayout
from dbsp_core.layout.strategy import Strategy
from dbsp_core.masks.block_mask import BlockMask
from dbsp_core.masks.grid import BlockGrid
from dbsp_core.masks.token_order import AXIS_ORDERS, CANONICAL
from dbsp_core.planning.plan import Plan, make_plan
from dbsp_core.planning.planners import PlannerConfig

__all__ = ["MOST_MASKS", "fastest_layout", "least_keys_layout"]

MOST_MASKS = 4
"""Masks that are looked at, evenly spread over those given: each costs a plan for every order."""
HEAD_DIM = 128
"""Head size that `fastest_layout` assumes: the layout is chosen before the first of them is seen."""


def least_keys_layout(
    masks: Sequence[BlockMask],
    strategy: Strategy,
    named: Callable[[BlockGrid], SequenceLayout] | None = None,
    cost: Callable[[Plan, SequenceLayout], float] | None = None,
    precision: str = "model",
) -> SequenceLayout:
    """Layout "local" in the order of tokens that costs least, summed over the masks.

    Tried are the order of the masks, six axis orders, and tiles that cut the video into as many boxes as ring ranks.

    Args:
        masks: Of the layers, with grids of the same tokens.
        strategy: How the ranks are used.
        named: Makes layout "local" on a grid. Default: text and video sharded together.
        cost: Of a plan in a layout, such as its predicted time. Default: what is sent between ring rows, by the rank
            that sends or receives most: keys and values, and the queries and outputs that change rows.
        precision: In which q, k and v travel; see `make_plan`.
    """
    named = named or (lambda grid: SequenceLayout.named("local", grid, strategy))
    grid = masks[0].grid
    if strategy.ring == 1:
        return named(replace(grid, orders=(grid.common_order or CANONICAL,)))
    layouts = [named(replace(grid, orders=(order,))) for order in _orders(grid, strategy.ring)]

    if len(layouts) == 1:
        return layouts[0]
    plan = partial(make_plan, strategy=strategy, planner="local", compare=False, keys="needed", precision=precision)
    costs = cost or _sent_between_rows
    return min(layouts, key=lambda layout: sum(costs(plan(mask, layout=layout), layout) for mask in _some(masks)))


def _sent_between_rows(plan: Plan, layout: SequenceLayout) -> float:
    traffic = traffic_of(plan.assignment, layout)
    ring_rank = np.arange(plan.strategy.world) // plan.strategy.ulysses
    sent = traffic.queries + traffic.combine + np.sum(traffic.key_exchanges, axis=0)
    sent = np.where(ring_rank[:, None] == ring_rank, 0, sent)
    return float(max(sent.sum(axis=0).max(), sent.sum(axis=1).max()))


def fastest_layout(
    masks: Sequence[BlockMask],
    strategies: Sequence[Strategy],
    named: Callable[[BlockGrid, Strategy], SequenceLayout],
    planner: PlannerConfig,
    hardware: Hardware | None,
    topology: Topology,
    element_bytes: int,
    precision: str = "model",
) -> SequenceLayout:
    """Returns the layout in which needed keys are predicted to be fastest: equal on all ranks, like the masks.

    Args:
        masks: Of the layers.
        strategies: Among which each attention's is chosen.
        named: Makes layout "local" on a grid, for a strategy.
        planner: Of the plans.
        hardware: Whose constants predict times. None: the first strategy by the rule is taken.
        topology: Of the ranks.
        element_bytes: Of q, k and v, assumed.
        precision: In which these travel; see `make_plan`.
    """
    if hardware is None:
        strategies = by_rule(strategies, masks[0].heads, topology)[:1]

    def shape(plan: Plan) -> AttentionShape:
        return AttentionShape(1, plan.heads, plan.grid.tokens, HEAD_DIM, element_bytes)

    def predicted_ns(plan: Plan, layout: SequenceLayout) -> int:
        if hardware is None:
            raise RuntimeError("layouts are chosen by a machine's constants, and none were loaded")
        return in_ns(predict(plan, shape(plan), hardware, topology, layout))

    def mask_ns(mask: BlockMask, layout: SequenceLayout, strategy: Strategy) -> int:
        how = partial(make_plan, layout=layout, compare=False, keys="needed", precision=precision)
        plan = how(mask, strategy, planner)
        return predicted_ns(plan, layout)

    def local(strategy: Strategy) -> SequenceLayout:
        cost = None if hardware is None else predicted_ns
        return least_keys_layout(masks, strategy, lambda grid: named(grid, strategy), cost, precision)

    found = [(local(strategy), strategy) for strategy in strategies]
    if len(found) == 1:
        return found[0][0]
    return min(found, key=lambda one: sum(mask_ns(mask, *one) for mask in _some(masks)))[0]


def _some(masks: Sequence[BlockMask]) -> list[BlockMask]:
    count = min(len(masks), MOST_MASKS)
    return [masks[index * len(masks) // count] for index in range(count)]


def _orders(grid: BlockGrid, ring: int) -> list[str]:
    """Without repetition, the masks' own first."""
    if grid.thw is None:
        return [CANONICAL]
    tiles = (f"tile:{t}x{h}x{w}" for t, h, w in _boxes(grid.thw, ring))
    own = grid.common_order
    return list(dict.fromkeys([own if isinstance(own, str) else CANONICAL, *AXIS_ORDERS, *tiles]))


def _boxes(thw: tuple[int, int, int], parts: int) -> Iterator[tuple[int, ...]]:
    """Sizes of boxes of which `parts` fill the video, cut along two axes or three."""
    for cuts in itertools.product(range(1, parts + 1), repeat=3):
        if math.prod(cuts) == parts and sum(cut > 1 for cut in cuts) > 1:
            yield tuple(-(-size // cut) for size, cut in zip(thw, cuts, strict=True))
