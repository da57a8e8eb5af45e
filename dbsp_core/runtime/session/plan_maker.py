"""Making plans as the configuration says: planner and strategy, weighed by a machine's constants."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

import torch

from dbsp_core.comm.consistency import run_consistently
from dbsp_core.comm.groups import SequenceGroup
from dbsp_core.config.config import DbspConfig
from dbsp_core.cost.free_memory import agree_on_memory
from dbsp_core.cost.hardware import Hardware, warn_if_elsewhere
from dbsp_core.cost.latency import AttentionShape, Topology, exchange_cost_of
from dbsp_core.cost.own_hardware import cost_basis, hardware_for
from dbsp_core.cost.peak_memory import (
    MemoryLimit,
    head_caps,
    mask_bytes,
    peak_bytes,
    prediction_bytes,
    within_limit,
)
from dbsp_core.cost.selection import StrategySelector, candidates, fastest_plan, in_fastest_chunks
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

__all__ = ["ConfiguredPlanMaker", "Machine", "PlanSettings", "strategies_of"]


class Machine(NamedTuple):
    """What all ranks of a session plan by.

    Attributes:
        hardware: The machine's constants. None: none are known, or plans don't depend on them.
        memory: What no rank is to exceed. None: there is no limit.
    """

    hardware: Hardware | None
    memory: MemoryLimit | None

    @classmethod
    def agreed(
        cls, config: DbspConfig, group: SequenceGroup, strategy: Strategy | None, device: torch.device
    ) -> Machine:
        """What ranks agree on. Collective where plans depend on constants, or the limit on what is free."""
        return cls(
            _load_constants(config, group, strategy, device),
            agree_on_memory(config.planner.memory_limit, group, device),
        )


@dataclass
class PlanSettings:
    """What the plans for one size of video are made by.

    Attributes:
        topology: Of the group's ranks.
        strategy: How the ranks are used. None: the selector chooses at each plan.
        layout: In which the sequence is sharded.
        hardware: The machine's constants, which weigh exchanges where the configuration leaves that to them.
        selector: Chooses strategies, where there is none.
        compare: Whether plans tell what the contiguous plan would do, as reports show it.
        memory: What no rank is to exceed.
        predicted_on: The type of the device where masks are predicted from queries and keys. None: they are not.
    """

    config: DbspConfig
    group: SequenceGroup
    topology: Topology
    strategy: Strategy | None
    layout: SequenceLayout
    hardware: Hardware | None
    selector: StrategySelector | None
    compare: bool
    memory: MemoryLimit | None
    predicted_on: str | None
    _warned: bool = field(default=False, init=False)

    @classmethod
    def of(
        cls,
        config: DbspConfig,
        group: SequenceGroup,
        topology: Topology,
        strategy: Strategy | None,
        layout: SequenceLayout,
        machine: Machine,
        grid: BlockGrid,
        device: torch.device,
        compare: bool,
    ) -> PlanSettings:
        """The settings for masks on `grid`, used on `device`."""
        selector, hardware = None, machine.hardware
        if strategy is None:
            make = partial(_selector, config, group, topology, layout, hardware, grid, device)
            selector = run_consistently(group, make)
        predicted_on = device.type if config.mask.changes == "per_call" else None
        return cls(
            config, group, topology, strategy, layout, hardware, selector, compare, machine.memory, predicted_on
        )

    def warn_once(self, limit: float, above: float, plan: Plan) -> None:
        """Says on rank 0 that a plan exceeds the `limit` of memory by `above`, both in bytes."""
        if self.group.rank != 0 or self._warned:
            return
        self._warned = True
        log.warning(
            "at its peak an attention holds %s on a rank beside q, k and v, more than planner.memory_limit leaves, "
            "%s: %s, so %s is used; take more GPUs, a smaller video or batch, or raise the limit",
            in_bytes(limit + above),
            in_bytes(max(0.0, limit)),
            "all strategies exceed it" if self.strategy is None else "no plan of this strategy fits",
            plan.strategy,
        )


@dataclass(frozen=True)
class ConfiguredPlanMaker:
    """Makes plans for attentions of one shape, by a session's settings.

    Attributes:
        gradients: Whether such an attention keeps what backward needs.
    """

    settings: PlanSettings
    shape: AttentionShape
    gradients: bool

    def make(self, mask: BlockMask, current: Plan | None) -> Plan:
        """See `plan_cache.PlanMaker`."""
        settings = self.settings
        if settings.strategy is not None:
            plan = self._plan(settings.strategy, mask)
        elif settings.selector is None:
            raise RuntimeError("a strategy is to be chosen, but nothing says among which")
        else:
            in_use, excess = None if current is None else current.strategy, self._excess if settings.memory else None
            plan = settings.selector.choose(lambda one: self._plan(one, mask), self.shape, in_use, excess)
        if settings.memory is not None:
            above = max(self._excess(plan), self._prediction_excess(mask))
            if above > 0:
                settings.warn_once(self._limit(settings.memory), above, plan)
        return plan

    def rank_plan(self, assignment: Assignment) -> RankPlan:
        """See `plan_cache.PlanMaker`."""
        return RankPlan.of(assignment, self.settings.layout, self.settings.group.rank)

    def _plan(self, strategy: Strategy, mask: BlockMask) -> Plan:
        """The plan with one strategy, and keys that travel as configured."""
        settings = self.settings
        planner, way = settings.config.planner, settings.config.key_way

        def make_by(config: PlannerConfig) -> Plan:
            how = partial(make_plan, layout=settings.layout, compare=settings.compare, keys=way.name)
            return how(mask, strategy, config, precision=settings.config.exchange.precision)

        if planner.name == "dbsp" and not way.known_masks:
            planner = replace(planner, exchange_cost=self._exchange_cost(strategy, mask))
            plan = self._balanced_plan(make_by, planner)
        else:
            plan = make_by(planner)
        return in_fastest_chunks(
            plan, mask, self.shape, settings.hardware, settings.topology, settings.layout, self._excess
        )

    def _balanced_plan(self, make_by: Callable[[PlannerConfig], Plan], planner: PlannerConfig) -> Plan:
        """Planner "dbsp"'s plan, or a simpler planner's that is predicted faster, within the limit if one is."""
        settings = self.settings

        def make(name: str, equal_heads: bool) -> Plan:
            return make_by(replace(planner, name=name, paper=replace(planner.paper, equal_heads=equal_heads)))

        if settings.hardware is None or not _weighs_exchanges(settings.config, settings.group):
            plan = make_by(planner)
        else:
            plan = fastest_plan(make, self.shape, settings.hardware, settings.topology, settings.layout, self._fits)
        if self._fits(plan):
            return plan
        capped = (make_by(replace(planner, most_heads=heads)) for heads in head_caps(plan))
        return within_limit(itertools.chain([plan], capped), self._excess)

    def _limit(self, memory: MemoryLimit) -> float:
        """Bytes that an attention may hold on a rank beside its inputs."""
        return memory.beside_inputs(self.shape, self.settings.layout)

    def _fits(self, plan: Plan) -> bool:
        return self.settings.memory is None or self._excess(plan) <= 0

    def _excess(self, plan: Plan) -> float:
        """Bytes by which the rank that holds most at its peak is above the limit."""
        settings = self.settings
        if settings.memory is None:
            return 0.0
        peaks = peak_bytes(plan.assignment, self.shape, settings.layout, gradients=self.gradients)
        bits = 0.0 if settings.predicted_on is None else mask_bytes(plan.grid, plan.heads)
        return float(peaks.max()) + bits - self._limit(settings.memory)

    def _prediction_excess(self, mask: BlockMask) -> float:
        """The same while a mask is predicted, whatever the plan is then."""
        settings = self.settings
        if settings.memory is None or settings.predicted_on is None:
            return 0.0
        held = prediction_bytes(mask.grid, self.shape, settings.group.size, settings.predicted_on == "cuda")
        return held - self._limit(settings.memory)

    def _exchange_cost(self, strategy: Strategy, mask: BlockMask) -> float:
        """The user's, or what the machine's constants say; without any 0: balance comes first."""
        settings = self.settings
        if settings.config.planner.exchange_cost is not None:
            return settings.config.planner.exchange_cost
        if settings.hardware is None:
            return 0.0
        wire = settings.config.exchange.wire
        return exchange_cost_of(mask, strategy, self.shape, settings.hardware, settings.topology, wire)


def _load_constants(
    config: DbspConfig, group: SequenceGroup, strategy: Strategy | None, device: torch.device
) -> Hardware | None:
    """The machine's, where plans depend on them. Collective then: all ranks must plan by the same."""
    if strategy is not None and not _weighs_exchanges(config, group):
        return None
    hardware = run_consistently(
        group,
        lambda: hardware_for(config.cost_model, device.type, config.kernel),
        lambda hardware: 0 if hardware is None else hardware.fingerprint,
        "the hardware file",
    )
    if group.rank == 0 and (strategy is None or hardware is not None):
        log.info("costs are estimated by %s", cost_basis(hardware))
    return hardware


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
    if hardware is not None and group.rank == 0:
        warn_if_elsewhere(hardware, device, _kernel_name(config.kernel, device))
    strategies = strategies_of(config, group, None, grid)
    return StrategySelector(strategies, hardware, topology, layout)


def _kernel_name(kernel: str, device: torch.device) -> str:
    """Returns the name of the kernel that is expected to run. Whether it can is checked at the first attention."""
    try:
        return choose_kernel(kernel, device, torch.bfloat16 if device.type == "cuda" else torch.float32).name
    except UserError:
        return kernel


def strategies_of(
    config: DbspConfig, group: SequenceGroup, strategy: Strategy | None, grid: BlockGrid
) -> tuple[Strategy, ...]:
    """The one that is given, or those to choose among."""
    return candidates(group.size, grid, returns_lse(config.kernel)) if strategy is None else (strategy,)
