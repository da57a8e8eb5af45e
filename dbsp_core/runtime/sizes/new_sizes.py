"""What a new size of video gets: its layout, what makes its plans, and what keeps them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dbsp_core.comm.groups import SequenceGroup
from dbsp_core.config.config import DbspConfig
from dbsp_core.cost.hardware import Hardware
from dbsp_core.cost.latency import Topology
from dbsp_core.cost.local_layout import fastest_layout
from dbsp_core.cost.peak_memory import MemoryLimit
from dbsp_core.cost.selection import AUTO
from dbsp_core.layout.learned import MaskProfile
from dbsp_core.layout.sequence_layout import HostLayout, SequenceLayout, Streams
from dbsp_core.layout.strategy import Strategy
from dbsp_core.masks.grid import BlockGrid
from dbsp_core.masks.video import Video
from dbsp_core.planning.plan import require_slots
from dbsp_core.runtime.mask_provider import MaskProvider
from dbsp_core.runtime.plan_maker import PlanSettings, agree_on_memory, load_constants, strategies_of
from dbsp_core.runtime.plan_reuse.async_plan_cache import AsyncPlanCache
from dbsp_core.runtime.plan_reuse.plan_cache import PlanCache, SyncPlanCache
from dbsp_core.runtime.plan_reuse.rule import ReplanRule, ReuseCounters
from dbsp_core.runtime.sizes.size_context import SizeContext
from dbsp_core.utils.log import log

__all__ = ["NewSizes"]


@dataclass
class NewSizes:
    """Makes the contexts of new sizes, by one session's settings. Constants and memory are agreed on at the first.

    topology: of the group's ranks
    strategy: how the ranks are used; None: as is predicted to be fastest, for each attention
    masks:    of the session, begun for the size
    counters: that all sizes' plan caches count in
    compare:  whether plans tell what the contiguous plan would do, as reports show it
    """

    config: DbspConfig
    group: SequenceGroup
    topology: Topology
    strategy: Strategy | None
    masks: MaskProvider
    counters: ReuseCounters
    compare: bool
    _hardware: Hardware | None = None
    _memory: MemoryLimit | None = None

    def prepare(self, size: tuple[Video, ...], device: torch.device, streams: Streams | HostLayout) -> SizeContext:
        """What a size gets. Collective: all ranks must plan by the same.

        streams: how text and video follow one another in the layout that is chosen here, or what gives the host's own
        Raises UserError, on all ranks, for a size the mask source or the strategy refuses.
        """
        grid = self.masks.grid(device)  # which all ranks have alike
        if self.strategy is not None:
            require_slots(self.strategy, grid)
        self._hardware = self._hardware or load_constants(self.config, self.group, self.strategy, device)
        self._memory = self._memory or agree_on_memory(self.config, self.group, device)
        layout = streams() if callable(streams) else self._layout(grid, streams, device)
        settings = PlanSettings.of(
            self.config,
            self.group,
            self.topology,
            self.strategy,
            layout,
            self._hardware,
            grid,
            device,
            self.compare,
            self._memory,
        )
        return SizeContext(self.masks.layers, size, settings, self.plan_cache())

    def _layout(self, grid: BlockGrid, streams: Streams, device: torch.device) -> SequenceLayout:
        profile = self._profile(device)

        def named(name: str, of: BlockGrid, strategy: Strategy) -> SequenceLayout:
            return SequenceLayout.named(name, of, strategy, streams=streams, profile=profile)

        # Stripes for the longest ring serve shorter ones as well: each of their ranks has stripes side by side.
        of_rings = named(self.config.effective_layout, grid, self.strategy or Strategy(1, self.group.size))
        if self.config.effective_keys != "ring" and self.config.layout is None and self.group.size > 1:
            fastest = fastest_layout(
                self.masks.masks_now(device),
                strategies_of(self.config, self.group, self.strategy, grid),
                lambda of, strategy: named("local", of, strategy),
                None if self.config.effective_keys == "needed" else of_rings,
                self.config.planner,
                self._hardware,
                self.topology,
                element_bytes=2 if device.type == "cuda" else 4,
            )
            if self.config.effective_keys == AUTO and self.group.rank == 0:
                name = self.config.effective_layout if fastest is of_rings else "local"
                log.info("layout %s, predicted to be fastest with keys: auto", name)
            return fastest
        return of_rings

    def plan_cache(self) -> PlanCache:
        """An empty one, as the configuration asks for."""
        rule = ReplanRule(self.config.reuse.threshold, self.config.reuse.budget)
        if self.config.effective_planning == "async":
            return AsyncPlanCache(rule, self.counters, self.compare, group=self.group)
        return SyncPlanCache(rule, self.counters, self.compare)

    def _profile(self, device: torch.device) -> MaskProfile | None:
        """Of all layers' masks, for layout "learned"; None where masks are not known before they are used."""
        if self.config.effective_layout != "learned":
            return None
        masks = self.masks.static_masks(device)
        return None if masks is None else MaskProfile.of(masks)
