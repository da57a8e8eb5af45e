"""Making plans as the configuration says: planner and strategy, weighed by a machine's constants."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from dbsp_core.comm.consistency import run_consistently
from dbsp_core.comm.groups import SequenceGroup
from dbsp_core.config.config import DbspConfig
from dbsp_core.cost.hardware import NEAREST, Hardware, load_hardware, warn_if_elsewhere
from dbsp_core.cost.latency import AttentionShape, Topology, exchange_cost_of
from dbsp_core.cost.selection import StrategySelector, candidates, fastest_plan
from dbsp_core.layout.sequence_layout import SequenceLayout
from dbsp_core.layout.strategy import Strategy
from dbsp_core.masks.block_mask import BlockMask
from dbsp_core.masks.grid import BlockGrid
from dbsp_core.planning.assignment import Assignment
from dbsp_core.planning.plan import Plan, make_plan
from dbsp_core.runtime.rank_plan import RankPlan
from dbsp_kernels import choose_kernel
from dbsp_kernels.registry import returns_lse

__all__ = ["ConfiguredPlanMaker", "load_constants"]


@dataclass(frozen=True)
class ConfiguredPlanMaker:
    """Makes plans for one size of video.

    strategy: how the ranks are used; None: the selector chooses at each plan
    hardware: whose constants weigh exchanges, where the configuration leaves that to them
    compare:  whether plans tell what the contiguous plan would do, as reports show it
    shape:    of the attention to plan for, see `for_shape`
    """

    config: DbspConfig
    group: SequenceGroup
    strategy: Strategy | None
    layout: SequenceLayout
    hardware: Hardware | None
    selector: StrategySelector | None
    compare: bool
    shape: AttentionShape | None = None

    @classmethod
    def of(
        cls,
        config: DbspConfig,
        group: SequenceGroup,
        strategy: Strategy | None,
        layout: SequenceLayout,
        hardware: Hardware | None,
        grid: BlockGrid,
        device: torch.device,
        compare: bool,
    ) -> ConfiguredPlanMaker:
        """grid: of the masks to come;  device: where they are used"""
        selector = None if strategy is not None else _selector(config, group, layout, hardware, grid, device)
        return cls(config, group, strategy, layout, hardware, selector, compare)

    def for_shape(self, shape: AttentionShape) -> ConfiguredPlanMaker:
        """The same for an attention of this shape."""
        return replace(self, shape=shape)

    def make(self, mask: BlockMask, current: Plan | None) -> Plan:
        """See `plan_reuse.plan_cache.PlanMaker`."""
        if self.strategy is not None:
            return self._plan(self.strategy, mask, mask)
        if self.selector is None:
            raise RuntimeError("a strategy is to be chosen, but nothing says among which")
        in_use = None if current is None else current.strategy
        return self.selector.choose(lambda strategy: self._plan(strategy, mask, mask), self._shape, in_use)

    def make_later(self, later: BlockMask, mask: BlockMask, strategy: Strategy) -> Plan | None:
        """See `plan_reuse.plan_cache.PlanMaker`."""
        return self._plan(strategy, later, mask)

    def rank_plan(self, assignment: Assignment) -> RankPlan:
        """See `plan_reuse.plan_cache.PlanMaker`."""
        return RankPlan.of(assignment, self.layout, self.group.rank)

    @property
    def _shape(self) -> AttentionShape:
        if self.shape is None:
            raise RuntimeError("plans are made for the shape of an attention; call for_shape first")
        return self.shape

    def _plan(self, strategy: Strategy, mask: BlockMask, real: BlockMask) -> Plan:
        """real: the mask at hand, where `mask` is a predicted one"""
        planner = replace(self.config.planner, exchange_cost=self._exchange_cost(strategy, real))

        def make(name: str, equal_heads: bool) -> Plan:
            config = replace(planner, name=name, paper=replace(planner.paper, equal_heads=equal_heads))
            return make_plan(mask, strategy, config, layout=self.layout, compare=self.compare and mask is real)

        weighs = planner.name == "dbsp" and self.config.planner.exchange_cost is None and self.group.size > 1
        if not weighs or self.hardware is None:
            return make(planner.name, planner.paper.equal_heads)
        return fastest_plan(make, self._shape, self.hardware, _topology_of(self.group), self.layout)

    def _exchange_cost(self, strategy: Strategy, mask: BlockMask) -> float:
        """The user's, or what the machine's constants say."""
        if self.config.planner.exchange_cost is not None:
            return self.config.planner.exchange_cost
        if self.hardware is None:
            return 0.0
        return exchange_cost_of(mask, strategy, self._shape, self.hardware, _topology_of(self.group))


def load_constants(
    config: DbspConfig, group: SequenceGroup, strategy: Strategy | None, device: torch.device
) -> Hardware | None:
    """The machine's, where plans depend on them. Collective then: all ranks must plan by the same."""
    weighs = config.planner.name == "dbsp" and config.planner.exchange_cost is None and group.size > 1
    if strategy is not None and not weighs:
        return None
    return run_consistently(
        group,
        lambda: load_hardware(config.cost_model or NEAREST[device.type == "cuda"]),
        device,
        lambda hardware: hardware.fingerprint,
        "the hardware file",
    )


def _selector(
    config: DbspConfig,
    group: SequenceGroup,
    layout: SequenceLayout,
    hardware: Hardware | None,
    grid: BlockGrid,
    device: torch.device,
) -> StrategySelector:
    if hardware is None:
        raise RuntimeError("strategies are chosen by a machine's constants, and none were loaded")
    if group.rank == 0:
        warn_if_elsewhere(hardware, device.type, choose_kernel(config.kernel, device.type, torch.float32).name)
    strategies = candidates(group.size, grid, returns_lse(config.kernel))
    return StrategySelector(strategies, hardware, _topology_of(group), layout)


def _topology_of(group: SequenceGroup) -> Topology:
    """How the ranks of a group are spread over nodes: by torchrun's count of ranks a node; without, on one."""
    a_node = os.environ.get("LOCAL_WORLD_SIZE")
    if a_node is None or group.group is None:
        return Topology(group.size, group.size)
    ranks = dist.get_process_group_ranks(group.group)
    return Topology(group.size, int(a_node), tuple(rank // int(a_node) for rank in ranks))
