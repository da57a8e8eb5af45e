"""What a session makes for one size of video: layout, plans, executors."""

from __future__ import annotations

import functools
import os
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import NamedTuple

from dbsp_core.comm.groups import SequenceGroup
from dbsp_core.config.config import DbspConfig
from dbsp_core.cost.hardware import Hardware
from dbsp_core.cost.latency import AttentionShape, Topology, exchange_cost_of
from dbsp_core.cost.selection import StrategySelector
from dbsp_core.layout.sequence_layout import SequenceLayout
from dbsp_core.layout.strategy import Strategy
from dbsp_core.masks.block_mask import BlockMask
from dbsp_core.planning.plan import Plan, make_plan
from dbsp_core.runtime.attention import DualBalancedAttention
from dbsp_core.runtime.plan_cache import AsyncPlanCache, PlanCache
from dbsp_core.runtime.rank_plan import RankPlan
from dbsp_core.sources import LocalQK

__all__ = ["Attention", "SizeContext"]

MOST_PASSES = 4
"""Passes of one denoising step that are told apart for each layer: guidance has two or three."""


class Attention(NamedTuple):
    """What a plan is kept for: a layer's attention in one of a step's passes, over one size of video."""

    size: Hashable
    layer: int
    branch: int


@dataclass
class SizeContext:
    """Plans and executors of one size of video.

    Plans are kept by attention where masks change, and by mask where they don't; executors by mask where it has a name
    (its cache key), else by attention. Both are bounded: an attention has one executor, and a layer at most
    `MOST_PASSES` attentions.
    layers:   of the model
    size:     names it
    hardware: whose constants weigh exchanges, where the configuration leaves that to them
    selector: chooses among strategies, where none is given
    plans:    of this size
    compare:  whether plans tell what the contiguous plan would do, as reports show it
    """

    config: DbspConfig
    group: SequenceGroup
    strategy: Strategy | None
    layers: int
    size: Hashable
    home: SequenceLayout
    hardware: Hardware | None
    selector: StrategySelector | None
    plans: PlanCache | AsyncPlanCache
    compare: bool
    plan_keys: dict[int, Hashable] = field(default_factory=dict)
    """By layer, what the plan of its last attention is kept for."""
    inputs_agreed: bool = False
    """Whether all ranks have compared the shapes of q, k and v."""
    _executors: dict[Hashable, DualBalancedAttention] = field(default_factory=dict)
    _used: OrderedDict[Attention, Hashable] = field(default_factory=OrderedDict)
    """By attention, the one used last at the end: what its executor is kept for."""

    @property
    def records(self) -> dict[int, Plan]:
        """By layer, its plan with the numbers of the mask that it was last used for. Waits for pending plans."""
        self.plans.settle()
        return {layer: self.plans.latest[key] for layer, key in sorted(self.plan_keys.items())}

    def for_each_call(
        self, attention: Attention, new_mask: Callable[[Hashable], BlockMask], tokens: LocalQK
    ) -> tuple[Hashable, DualBalancedAttention]:
        """The executor of an attention whose mask is computed from its queries and keys, and what it is kept by."""
        executor = self._make(attention, attention, new_mask(attention), tokens)
        self._keep(attention, attention, attention, executor)
        return attention, executor

    def for_mask_named(
        self,
        attention: Attention,
        name: Hashable,
        changes: bool,
        new_mask: Callable[[Hashable], BlockMask],
        tokens: LocalQK,
    ) -> tuple[Hashable, DualBalancedAttention]:
        """The executor of an attention whose mask has a name: made before, for this layer or another, or now.

        returns: it, after what it is kept by
        changes: whether the attention will have other masks: then its plan is kept from one to the next
        """
        key = self.size, name, tokens.q.device
        plan_key: Hashable = attention if changes else key
        executor = self._executors.get(key)
        if executor is None or not self.plans.count_reuse(plan_key, executor.plan):
            executor = self._make(attention, plan_key, new_mask(key), tokens)
        self._keep(attention, key, plan_key, executor)
        return key, executor

    def _keep(self, attention: Attention, key: Hashable, plan_key: Hashable, executor: DualBalancedAttention) -> None:
        """Remembers an attention's executor, and drops those that no attention has any more."""
        self._executors[key] = executor
        self.plan_keys[attention.layer] = plan_key
        outdated = {self._used.get(attention, key)}
        self._used[attention] = key
        self._used.move_to_end(attention)
        if len(self._used) > self.layers * MOST_PASSES:
            oldest, its_key = self._used.popitem(last=False)
            self.plans.forget(oldest)
            outdated.add(its_key)
        for one in outdated.difference(self._used.values()):
            self._executors.pop(one, None)

    def _make(
        self, attention: Attention, plan_key: Hashable, mask: BlockMask, tokens: LocalQK
    ) -> DualBalancedAttention:
        batch, heads, _, width = tokens.q.shape
        items = batch if mask.heads == heads else 1  # of a batch whose items have masks of their own
        shape = AttentionShape(items, mask.heads, mask.grid.tokens, width, tokens.q.element_size())
        planned = self.plans.plan_for(
            plan_key,
            mask,
            functools.partial(self._plan, shape),
            lambda later, strategy: self._plan_with(strategy, later, shape, mask),
            lambda plan: RankPlan.of(plan, self.home, self.group.rank),
        )
        plan, device = planned.plan, tokens.q.device
        before = self._executors.get(self._used.get(attention))
        if before is not None and before.device == device and plan.same_route(before.plan):
            return before.for_mask(plan, mask)
        part = (planned.part or RankPlan.of(plan, self.home, self.group.rank)).to(device)
        return DualBalancedAttention.of_part(
            part, plan, mask, self.group, kernel=self.config.kernel, debug=self.config.debug
        )

    def _plan(self, shape: AttentionShape, mask: BlockMask, current: Plan | None) -> Plan:
        if self.strategy is not None:
            return self._plan_with(self.strategy, mask, shape, mask)
        if self.selector is None:
            raise RuntimeError("a strategy is to be chosen, but nothing says among which")
        in_use = None if current is None else current.strategy
        return self.selector.choose(lambda strategy: self._plan_with(strategy, mask, shape, mask), shape, in_use)

    def _plan_with(self, strategy: Strategy, mask: BlockMask, shape: AttentionShape, real: BlockMask) -> Plan:
        """real: the mask at hand, where `mask` is one that is foreseen"""
        config = self.config
        return make_plan(
            mask,
            strategy,
            config.planner,
            home=self.home,
            reward=config.reward,
            head_cap=config.head_cap,
            tolerance=config.tolerance,
            exchange_cost=self._exchange_cost(strategy, shape, real),
            compare=self.compare and mask is real,
        )

    def _exchange_cost(self, strategy: Strategy, shape: AttentionShape, mask: BlockMask) -> float:
        """The user's, or what the machine's constants say."""
        if self.config.exchange_cost is not None:
            return self.config.exchange_cost
        if self.hardware is None:
            return 0.0
        return exchange_cost_of(mask, strategy, shape, self.hardware, topology_of(self.group))


def topology_of(group: SequenceGroup) -> Topology:
    """How the ranks of a group lie on nodes."""
    return Topology(group.size, min(group.size, int(os.environ.get("LOCAL_WORLD_SIZE", group.size))))
