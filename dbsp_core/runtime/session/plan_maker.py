"""Making plans as the configuration says: planner and strategy, weighed by a machine's constants."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from dbsp_core.comm.consistency import run_consistently
from dbsp_core.comm.groups import SequenceGroup
from dbsp_core.config.config import DbspConfig
from dbsp_core.cost.hardware import Hardware, warn_if_elsewhere
from dbsp_core.cost.latency import AttentionShape, Topology
from dbsp_core.cost.own_hardware import cost_basis, hardware_for
from dbsp_core.cost.selection import StrategySelector, candidates
from dbsp_core.layout.sequence_layout import SequenceLayout
from dbsp_core.layout.strategy import Strategy
from dbsp_core.masks.block_mask import BlockMask
from dbsp_core.masks.grid import BlockGrid
from dbsp_core.planning.assignment import Assignment
from dbsp_core.planning.plan import Plan, make_plan
from dbsp_core.runtime.rank_plan import RankPlan
from dbsp_core.utils.errors import UserError
from dbsp_core.utils.log import log
from dbsp_kernels import choose_kernel
from dbsp_kernels.registry import returns_lse

__all__ = ["ConfiguredPlanMaker", "PlanSettings", "agree_on_constants", "strategies_of"]


@dataclass
class PlanSettings:
    """What the plans for one size of video are made by.

    Attributes:
        topology: Of the group's ranks.
        strategy: How the ranks are used. None: the selector chooses at each plan.
        layout: In which the sequence is sharded.
        selector: Chooses strategies, where there is none.
        compare: Whether plans tell what the contiguous plan would do, as reports show it.
    """

    config: DbspConfig
    group: SequenceGroup
    topology: Topology
    strategy: Strategy | None
    layout: SequenceLayout
    selector: StrategySelector | None
    compare: bool

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
    ) -> PlanSettings:
        """The settings for masks on `grid`, used on `device`."""
        selector = None
        if strategy is None:
            make = partial(_selector, config, group, topology, layout, hardware, grid, device)
            selector = run_consistently(group, make)
        return cls(config, group, topology, strategy, layout, selector, compare)


@dataclass(frozen=True)
class ConfiguredPlanMaker:
    """Makes plans for attentions of one shape, by a session's settings."""

    settings: PlanSettings
    shape: AttentionShape

    def make(self, mask: BlockMask, current: Plan | None) -> Plan:
        """See `plan_cache.PlanMaker`."""
        settings = self.settings
        if settings.strategy is not None:
            return self._plan(settings.strategy, mask)
        if settings.selector is None:
            raise RuntimeError("a strategy is to be chosen, but nothing says among which")
        in_use = None if current is None else current.strategy
        return settings.selector.choose(lambda one: self._plan(one, mask), self.shape, in_use)

    def rank_plan(self, assignment: Assignment) -> RankPlan:
        """See `plan_cache.PlanMaker`."""
        return RankPlan.of(assignment, self.settings.layout, self.settings.group.rank)

    def _plan(self, strategy: Strategy, mask: BlockMask) -> Plan:
        """The plan with one strategy, and keys that travel as configured."""
        settings = self.settings
        config, how = settings.config, partial(make_plan, layout=settings.layout, compare=settings.compare)
        return how(mask, strategy, config.planner, keys=config.keys, precision=config.exchange.precision)


def agree_on_constants(
    config: DbspConfig, group: SequenceGroup, strategy: Strategy | None, device: torch.device
) -> Hardware | None:
    """Returns the machine's constants where strategies are chosen by them, else None. Collective then."""
    if strategy is not None:
        return None
    hardware = run_consistently(
        group,
        lambda: hardware_for(config.cost_model, device.type, config.kernel),
        lambda hardware: 0 if hardware is None else hardware.fingerprint,
        "the hardware file",
    )
    if group.rank == 0:
        log.info("costs are estimated by %s", cost_basis(hardware))
    return hardware


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
