"""Making plans as the configuration says: planner and strategy, weighed by a machine's constants."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace

import torch

from dbsp_core.comm.consistency import run_consistently
from dbsp_core.comm.groups import SequenceGroup
from dbsp_core.comm.nodes import ranks_on_this_node
from dbsp_core.config.config import DbspConfig
from dbsp_core.cost.free_memory import free_memory
from dbsp_core.cost.hardware import NEAREST, Hardware, load_hardware, warn_if_elsewhere
from dbsp_core.cost.latency import AttentionShape, Topology, exchange_cost_of, predict
from dbsp_core.cost.peak_memory import (
    MemoryLimit,
    head_caps,
    mask_bytes,
    peak_bytes,
    prediction_bytes,
    within_limit,
)
from dbsp_core.cost.selection import AUTO, StrategySelector, candidates, fastest_plan, in_fastest_chunks, in_ns
from dbsp_core.layout.sequence_layout import SequenceLayout
from dbsp_core.layout.strategy import Strategy
from dbsp_core.masks.block_mask import BlockMask
from dbsp_core.masks.grid import BlockGrid
from dbsp_core.planning.assignment import Assignment
from dbsp_core.planning.plan import Plan, make_plan
from dbsp_core.planning.planners import PlannerConfig
from dbsp_core.runtime.rank_plan import RankPlan
from dbsp_core.utils.byte_sizes import in_bytes
from dbsp_core.utils.errors import UserError
from dbsp_core.utils.log import log
from dbsp_kernels import choose_kernel
from dbsp_kernels.registry import returns_lse

__all__ = ["ConfiguredPlanMaker", "agree_on_memory", "load_constants", "strategies_of"]


@dataclass(frozen=True)
class ConfiguredPlanMaker:
    """Makes plans for one size of video.

    topology: of the group's ranks
    strategy: how the ranks are used; None: the selector chooses at each plan
    hardware: whose constants weigh exchanges, where the configuration leaves that to them
    compare:  whether plans tell what the contiguous plan would do, as reports show it
    memory:   that no rank is to exceed
    predicted_on: the type of the device where masks are predicted from queries and keys; None: they are not
    shape:    of the attention to plan for, see `for_shape`;  gradients: whether it keeps what backward needs
    """

    config: DbspConfig
    group: SequenceGroup
    topology: Topology
    strategy: Strategy | None
    layout: SequenceLayout
    hardware: Hardware | None
    selector: StrategySelector | None
    compare: bool
    memory: MemoryLimit | None = None
    predicted_on: str | None = None
    shape: AttentionShape | None = None
    gradients: bool = False
    _warned: set[Strategy | None] = field(default_factory=set)

    @classmethod
    def of(
        cls,
        config: DbspConfig,
        group: SequenceGroup,
        topology: Topology,
        strategy: Strategy | None,
        layout: SequenceLayout,
        hardware: Hardware | None,
        grid: BlockGrid,
        device: torch.device,
        compare: bool,
        memory: MemoryLimit | None = None,
    ) -> ConfiguredPlanMaker:
        """grid: of the masks to come;  device: where they are used"""
        selector = None
        if strategy is None:
            selector = _selector(config, group, topology, layout, hardware, grid, device)
        predicted_on = device.type if config.mask.changes == "per_call" else None
        return cls(config, group, topology, strategy, layout, hardware, selector, compare, memory, predicted_on)

    def for_shape(self, shape: AttentionShape, gradients: bool = False) -> ConfiguredPlanMaker:
        """The same for an attention of this shape."""
        return replace(self, shape=shape, gradients=gradients)

    def make(self, mask: BlockMask, current: Plan | None) -> Plan:
        """See `plan_reuse.plan_cache.PlanMaker`."""
        if self.strategy is not None:
            plan = self._plan(self.strategy, mask)
        elif self.selector is None:
            raise RuntimeError("a strategy is to be chosen, but nothing says among which")
        else:
            in_use, excess = None if current is None else current.strategy, self._excess if self.memory else None
            plan = self.selector.choose(lambda one: self._plan(one, mask), self._shape, in_use, excess)
        if self.memory is not None:
            above = max(self._excess(plan), self._prediction_excess(mask))
            if above > 0:
                self._warn_of(plan, above)
        return plan

    def rank_plan(self, assignment: Assignment) -> RankPlan:
        """See `plan_reuse.plan_cache.PlanMaker`."""
        return RankPlan.of(assignment, self.layout, self.group.rank)

    @property
    def _shape(self) -> AttentionShape:
        if self.shape is None:
            raise RuntimeError("plans are made for the shape of an attention; call for_shape first")
        return self.shape

    def _plan(self, strategy: Strategy, mask: BlockMask) -> Plan:
        """With keys as configured: for "auto" whichever plan is predicted faster, among those within the limit."""
        keys, plans = self.config.effective_keys, []
        if keys != "needed":
            plans.append(self._ring_plan(strategy, mask))
        if keys != "ring":
            plans.append(self._plan_of_needed_keys(strategy, mask))
        if len(plans) == 1 or self.hardware is None:
            return plans[0]
        hardware = self.hardware

        def cost(plan: Plan) -> tuple[float, int]:
            return max(0.0, self._excess(plan)), in_ns(
                predict(plan, self._shape, hardware, self.topology, self.layout)
            )

        return min(plans, key=cost)

    def _plan_of_needed_keys(self, strategy: Strategy, mask: BlockMask) -> Plan:
        plan = make_plan(mask, strategy, self.config.planner, layout=self.layout, compare=self.compare, keys="needed")
        return in_fastest_chunks(plan, mask, self._shape, self.hardware, self.topology, self.layout, self._excess)

    def _ring_plan(self, strategy: Strategy, mask: BlockMask) -> Plan:
        planner = replace(self.config.planner, exchange_cost=self._exchange_cost(strategy, mask))

        def make_by(config: PlannerConfig) -> Plan:
            return make_plan(mask, strategy, config, layout=self.layout, compare=self.compare)

        def make(name: str, equal_heads: bool) -> Plan:
            return make_by(replace(planner, name=name, paper=replace(planner.paper, equal_heads=equal_heads)))

        if self.hardware is None or not _weighs_exchanges(self.config, self.group):
            plan = make_by(planner)
        else:
            plan = fastest_plan(make, self._shape, self.hardware, self.topology, self.layout, self._fits)
        if self._fits(plan) or planner.name != "dbsp":
            return plan
        capped = (make_by(replace(planner, most_heads=heads)) for heads in head_caps(plan))
        return within_limit(itertools.chain([plan], capped), self._excess)

    def _fits(self, plan: Plan) -> bool:
        return self.memory is None or self._excess(plan) <= 0

    def _excess(self, plan: Plan) -> float:
        """Bytes by which the rank that holds most at its peak is above the limit."""
        if self.memory is None:
            return 0.0
        peaks = peak_bytes(plan.assignment, self._shape, self.layout, gradients=self.gradients)
        bits = 0.0 if self.predicted_on is None else mask_bytes(plan.grid, plan.heads)
        return float(peaks.max()) + bits - self.memory.beside_inputs(self._shape, self.layout)

    def _prediction_excess(self, mask: BlockMask) -> float:
        """The same while a mask is predicted, whatever the plan is then."""
        if self.memory is None or self.predicted_on is None:
            return 0.0
        held = prediction_bytes(mask.grid, self._shape, self.group.size, self.predicted_on == "cuda")
        return held - self.memory.beside_inputs(self._shape, self.layout)

    def _warn_of(self, plan: Plan, above: float) -> None:
        """Once for each strategy, or one that was to be chosen. above: the limit, in bytes"""
        if self.memory is None or self.group.rank != 0 or self.strategy in self._warned:
            return
        self._warned.add(self.strategy)
        limit = self.memory.beside_inputs(self._shape, self.layout)
        log.warning(
            "at its peak an attention holds %s on a rank beside q, k and v, more than planner.memory_limit leaves, "
            "%s: %s, so %s is used; take more GPUs, a smaller video or batch, or raise the limit",
            in_bytes(limit + above),
            in_bytes(max(0.0, limit)),
            "all strategies exceed it" if self.strategy is None else "no plan of this strategy fits",
            plan.strategy,
        )

    def _exchange_cost(self, strategy: Strategy, mask: BlockMask) -> float:
        """The user's, or what the machine's constants say."""
        if self.config.planner.exchange_cost is not None:
            return self.config.planner.exchange_cost
        if self.hardware is None:
            return 0.0
        return exchange_cost_of(mask, strategy, self._shape, self.hardware, self.topology)


def agree_on_memory(config: DbspConfig, group: SequenceGroup, device: torch.device) -> MemoryLimit | None:
    """The limit that is set, or for "auto" the least that is free on any rank now. Collective then.

    On CPUs: of what the host has free, an even share for each of its ranks.
    """
    limit = config.planner.memory_limit
    if not isinstance(limit, str):
        return None if limit is None else MemoryLimit(limit)
    mine = free_memory(device)
    if mine is not None and device.type != "cuda":
        mine //= ranks_on_this_node() or group.size
    least = min(free for (free,) in group.gather_integers([-1 if mine is None else mine], device))
    if least < 0:
        raise UserError(
            "planner.memory_limit: auto cannot tell how much memory is free here; write an amount, as 8GiB"
        )
    return MemoryLimit(least, free=True)


def load_constants(
    config: DbspConfig, group: SequenceGroup, strategy: Strategy | None, device: torch.device
) -> Hardware | None:
    """The machine's, where plans depend on them. Collective then: all ranks must plan by the same."""
    weighs = _weighs_exchanges(config, group)
    if strategy is not None and not weighs and (config.effective_keys != AUTO or group.size == 1):
        return None
    return run_consistently(
        group,
        lambda: load_hardware(config.cost_model or NEAREST[device.type == "cuda"]),
        device,
        lambda hardware: hardware.fingerprint,
        "the hardware file",
    )


def _weighs_exchanges(config: DbspConfig, group: SequenceGroup) -> bool:
    """Whether plans depend on what the machine's constants say of exchanges."""
    return config.planner.name == "dbsp" and config.planner.exchange_cost is None and group.size > 1


def _selector(
    config: DbspConfig,
    group: SequenceGroup,
    topology: Topology,
    layout: SequenceLayout,
    hardware: Hardware | None,
    grid: BlockGrid,
    device: torch.device,
) -> StrategySelector:
    if hardware is None:
        raise RuntimeError("strategies are chosen by a machine's constants, and none were loaded")
    if group.rank == 0:
        warn_if_elsewhere(hardware, device.type, choose_kernel(config.kernel, device.type, torch.float32).name)
    strategies = strategies_of(config, group, None, grid)
    return StrategySelector(strategies, hardware, topology, layout)


def strategies_of(
    config: DbspConfig, group: SequenceGroup, strategy: Strategy | None, grid: BlockGrid
) -> tuple[Strategy, ...]:
    """The one that is given, or those to choose among."""
    return candidates(group.size, grid, returns_lse(config.kernel)) if strategy is None else (strategy,)
