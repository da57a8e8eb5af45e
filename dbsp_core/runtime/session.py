"""One transformer's attentions: which mask, plan and executor each gets. Both hosts share it."""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist

from dbsp_core.comm.consistency import check_consistent, gather_texts, run_consistently
from dbsp_core.comm.groups import SequenceGroup, report_group
from dbsp_core.config.config import DbspConfig
from dbsp_core.cost.hardware import NEAREST, Hardware, load_hardware, warn_if_elsewhere
from dbsp_core.cost.selection import StrategySelector, candidates
from dbsp_core.layout.sequence_layout import MaskProfile, SequenceLayout
from dbsp_core.layout.strategy import Strategy
from dbsp_core.masks.block_mask import BlockMask
from dbsp_core.masks.grid import BlockGrid
from dbsp_core.planning.plan import Plan, require_slots
from dbsp_core.reports.mask_recorder import MaskRecorder
from dbsp_core.reports.observer import RunObserver
from dbsp_core.runtime.attention import (
    INPUTS_DIFFER,
    NO_GRADIENTS,
    DualBalancedAttention,
    inputs_fingerprint,
    needs_gradients,
)
from dbsp_core.runtime.mask_provider import MaskProvider
from dbsp_core.runtime.plan_cache import AsyncPlanCache, PlanCache, ReplanRule, ReuseCounters
from dbsp_core.runtime.size_context import Attention, SizeContext, topology_of
from dbsp_core.sources import LocalQK
from dbsp_core.utils.errors import UserError
from dbsp_core.utils.fingerprint import fingerprint_of
from dbsp_kernels import KernelRequirements, choose_kernel, require_fit
from dbsp_kernels.registry import returns_lse

__all__ = ["MOST_SIZES", "AttentionSession"]

MOST_SIZES = 4
"""Sizes of video (with text) whose plans are kept: the passes of guidance may have texts of two lengths."""

_CPU = torch.device("cpu")
_SETTINGS_DIFFER = "the settings differ on rank(s) {}; give all ranks the same configuration, heads and layers"
_SIZES_DIFFER = "the size of the video differs on rank(s) {}; give all ranks the same input"
_TWO_THREADS = (
    "two threads use db-SP on the same ranks at once, which would answer each other's calls; let one run at a time, "
    "or give each a process group of its own"
)


@dataclass
class AttentionSession:
    """State of one transformer: `begin` at every forward pass, then `attend` once a layer.

    strategy: how the group's ranks are used; None: as is predicted to be fastest, for each attention
    heads:    attention heads of every layer
    layers:   number of layers
    steps:    tells how many denoising steps there will be, where the host knows
    generation: gives an object that is another one for each generation, where the host has one
    observer: collects what a report tells, where one is wanted
    Raises ValueError at construction when strategy, group and kernel don't fit.
    """

    config: DbspConfig
    group: SequenceGroup
    strategy: Strategy | None
    heads: int
    layers: int
    steps: Callable[[], int | None] = lambda: None
    generation: Callable[[], object] = lambda: None
    observer: RunObserver | None = field(init=False)
    _feed: MaskProvider = field(init=False)
    _recorder: MaskRecorder = field(init=False)
    _counters: ReuseCounters = field(default_factory=ReuseCounters)
    _sizes: OrderedDict[Hashable, SizeContext] = field(default_factory=OrderedDict)
    """By size of video, the one used last at the end."""
    _hardware: Hardware | None = None
    _reached: set[int] = field(default_factory=set)
    _lock: threading.Lock = field(init=False)

    def __post_init__(self) -> None:
        self._lock = _lock_of(self.group)
        self._agree_on_settings()
        self._recorder = MaskRecorder.of(self.config.record, self.group, self.layers)
        self._feed = MaskProvider(
            self.config.mask,
            self.config.dense,
            self.heads,
            self.layers,
            self.group,
            self.steps,
            count_steps=self._recorder.wanted,
            generation=self.generation,
        )
        if self.planning == "lagged":
            self._plan_cache()  # while no rank can have failed yet: making its process group is a collective
        self.observer = None
        if self.config.report is not None:
            self.observer = RunObserver()
            report_group(self.group)  # likewise

    def _agree_on_settings(self) -> None:
        """Raises UserError on all ranks for settings that don't fit or differ. All ranks make reports, or none."""
        problem = None
        try:
            if self.strategy is not None:
                self.strategy.require_world(self.group.size)
                require_fit(self.config.kernel, KernelRequirements(lse=self.strategy.ring > 1))
        except UserError as error:
            problem = error
        control = self.group.control()
        shared = replace(self.config, strategy=self.strategy)
        check_consistent(
            control, problem, {_SETTINGS_DIFFER: fingerprint_of((shared.fingerprint, self.heads, self.layers))}, _CPU
        )
        if control.group is not None:
            folders = gather_texts(control, self.config.report or "", _CPU)
            self.config = replace(self.config, report=next((folder for folder in folders if folder), None))

    @torch.compiler.disable
    def begin(
        self,
        thw: tuple[int, int, int],
        text_tokens: int = 0,
        timestep: torch.Tensor | float | None = None,
        device: torch.device | str = "cpu",
        *,
        branch: int = 0,
        host_home: Callable[[], SequenceLayout] | None = None,
    ) -> SequenceLayout:
        """Starts a forward pass over a video of this token grid. returns: the layout its sequence must be sharded in.

        timestep: of the denoising, for masks that depend on the step
        device:   where the group's collectives run
        branch:   guidance pass that this one is, where the host gives each to a group of ranks of its own
        host_home: gives the layout in which the host itself shards this size of video; None: ours to choose
        Text, where the model has it in the same sequence, is sharded apart from video. What was made for the last
        `MOST_SIZES` sizes is kept. Raises UserError, on all ranks, for a size the mask source refuses.
        """
        with self._alone():
            self._reached.clear()
            self._feed.begin(thw, text_tokens, timestep, branch)
            self._recorder.begin(self._feed.moment)
            if self.observer is not None:
                self.observer.begin(timestep)
            size, place = (thw, text_tokens), torch.device(device)
            if self.config.debug:
                check_consistent(self.group, None, {_SIZES_DIFFER: fingerprint_of(size)}, place)
            if size not in self._sizes:
                self._sizes[size] = self._new_size(size, place, host_home)
                if len(self._sizes) > MOST_SIZES:
                    self._drop_oldest_size()
            self._sizes.move_to_end(size)
            self._feed.name_masks(place)
            return self.home

    def end(self) -> int:
        """Ends a forward pass. returns: how many layers' attentions it reached."""
        return len(self._reached)

    @property
    def home(self) -> SequenceLayout:
        """The layout of the current forward pass."""
        return self._now.home

    @torch.compiler.disable
    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float | None = None
    ) -> torch.Tensor:
        """q, k, v: [B, H, shard, D], this rank's tokens, padding included. returns: [B, H, shard, D]."""
        with self._alone():
            self._check(q, k, v)
            scale = q.shape[-1] ** -0.5 if scale is None else scale
            started = None if self.observer is None else self.observer.mark(q.device)
            executor = self._executor(layer, LocalQK(q, k, self.home, self.group, scale))
            self._reached.add(layer)
            try:
                if executor.plan.heads == q.shape[1]:
                    out = executor(q, k, v, scale=scale)
                else:  # every item has masks of its own, as B·H heads
                    items = (t.flatten(0, 1).unsqueeze(0) for t in (q, k, v))
                    out = executor(*items, scale=scale).view(q.shape)
            finally:
                self._now.plans.start()
            if self.observer is not None and started is not None:
                key, latest = self._now.plan_keys[layer], self._now.plans.latest
                self.observer.attended(layer, key, executor, q, started, latest, self.planning == "lagged")
            return out

    def settle(self) -> None:
        """Waits for pending plans, so that whatever is read covers every call."""
        for context in self._sizes.values():
            context.plans.settle()
            if self.observer is not None:
                self.observer.settle(context.plans.latest)

    @property
    def records(self) -> dict[int, Plan]:
        """By layer, its plan with the numbers of the mask that it was last used for. Waits for pending plans."""
        return self._now.records if self._sizes else {}

    @property
    def chosen(self) -> dict[Strategy, int]:
        """How often each strategy was, where it was left to be chosen; for this size of video."""
        self.settle()
        selector = self._now.selector if self._sizes else None
        return {} if selector is None else dict(selector.chosen)

    @property
    def reuse(self) -> ReuseCounters:
        """How often plans were kept."""
        self.settle()
        return self._counters

    @property
    def planning(self) -> str:
        """ "immediate" or "lagged": what "auto" comes to for these masks."""
        if self.config.planning != "auto":
            return self.config.planning
        return "lagged" if self.config.mask.changes == "per_call" else "immediate"

    @property
    def _now(self) -> SizeContext:
        """What was made for the size of the current forward pass."""
        if not self._sizes:
            raise RuntimeError("attention was reached before the forward pass began; attach db-SP to the transformer")
        return next(reversed(self._sizes.values()))

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Raises UserError where another thread is within a call on the same ranks."""
        if not self._lock.acquire(blocking=False):
            raise UserError(_TWO_THREADS)
        try:
            yield
        finally:
            self._lock.release()

    def _check(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Before any collective of a call. All ranks compare shapes at the first call of a size, and under debug."""
        if needs_gradients(q, k, v):
            raise UserError(NO_GRADIENTS)
        now, problem = self._now, None
        if not (q.ndim == 4 and q.shape == k.shape == v.shape and q.shape[1:3] == (self.heads, now.home.shard)):
            shapes = ", ".join(str(tuple(t.shape)) for t in (q, k, v))
            wanted = f"[batch, {self.heads}, {now.home.shard}, head size]"
            problem = UserError(f"q, k, v must be {wanted} of one shape, as the layout shards them, got {shapes}")
        if self.config.debug or not now.inputs_agreed:
            check_consistent(self.group, problem, {INPUTS_DIFFER: inputs_fingerprint(q)}, q.device)
            now.inputs_agreed = True
        elif problem is not None:
            raise problem

    def _executor(self, layer: int, tokens: LocalQK) -> DualBalancedAttention:
        """For this layer's mask now."""
        now = self._now
        attention = Attention(now.size, layer, self._feed.moment.cfg_branch)
        name = self._feed.cache_key(layer)

        def new_mask(key: Hashable) -> BlockMask:
            mask = self._feed.mask(layer, tokens)
            self._recorder.keep(key, layer, mask, name is not None)
            return mask

        if name is None:
            key, executor = now.for_each_call(attention, new_mask, tokens)
        else:
            key, executor = now.for_mask_named(attention, name, self._feed.changes(layer), new_mask, tokens)
        self._recorder.used(layer, key)
        return executor

    def _new_size(
        self,
        size: tuple[tuple[int, int, int], int],
        device: torch.device,
        host_home: Callable[[], SequenceLayout] | None,
    ) -> SizeContext:
        """Collective: all ranks must plan by the same."""
        grid = self._feed.grid(device)  # which all ranks have alike
        if self.strategy is not None:
            require_slots(self.strategy, grid)
        hardware = self._hardware = self._hardware or self._constants(device)
        home = self._layout(grid, size[1], device) if host_home is None else host_home()
        selector = None if self.strategy is not None else self._new_selector(grid, home, hardware, device)
        compare = self.observer is not None
        plans = self._plan_cache()
        return SizeContext(
            self.config, self.group, self.strategy, self.layers, size, home, hardware, selector, plans, compare
        )

    def _drop_oldest_size(self) -> None:
        """Once what is being planned for it is done: on all ranks alike."""
        oldest = self._sizes.pop(next(iter(self._sizes)))
        oldest.plans.settle()
        if self.observer is not None:
            self.observer.settle(oldest.plans.latest)

    def _layout(self, grid: BlockGrid, text_tokens: int, device: torch.device) -> SequenceLayout:
        # Stripes for the longest ring serve shorter ones as well: each of their ranks has stripes side by side.
        strategy = self.strategy or Strategy(1, self.group.size)
        profile = self._profile(device)
        return SequenceLayout.named(
            self.config.home_layout, grid, strategy, split_text=text_tokens > 0, profile=profile
        )

    def _plan_cache(self) -> PlanCache | AsyncPlanCache:
        rule = ReplanRule(self.config.replan_threshold, self.config.replan_budget)
        compare = self.config.report is not None
        if self.planning == "lagged":
            return AsyncPlanCache(rule, self.group, self._counters, compare)
        return PlanCache(rule, self._counters, compare)

    def _profile(self, device: torch.device) -> MaskProfile | None:
        """Of all layers' masks, for layout "learned"; None where masks are not known before they are used."""
        if self.config.home_layout != "learned":
            return None
        masks = self._feed.static_masks(device)
        return None if masks is None else MaskProfile.of(masks)

    def _constants(self, device: torch.device) -> Hardware | None:
        """The machine's, where plans depend on them. Collective then: all ranks must plan by the same."""
        weighs = self.config.planner == "dbsp" and self.config.exchange_cost is None and self.group.size > 1
        if self.strategy is not None and not weighs:
            return None
        return run_consistently(
            self.group,
            lambda: load_hardware(self.config.hardware or NEAREST[device.type == "cuda"]),
            device,
            lambda hardware: hardware.fingerprint,
            "the hardware file",
        )

    def _new_selector(
        self, grid: BlockGrid, home: SequenceLayout, hardware: Hardware | None, device: torch.device
    ) -> StrategySelector:
        if hardware is None:
            raise RuntimeError("strategies are chosen by a machine's constants, and none were loaded")
        if self.group.rank == 0:
            kernel = choose_kernel(self.config.kernel, device.type, torch.float32).name
            warn_if_elsewhere(hardware, device.type, kernel)
        strategies = candidates(self.group.size, grid, returns_lse(self.config.kernel))
        return StrategySelector(strategies, hardware, topology_of(self.group), home)


_LOCKS: weakref.WeakKeyDictionary[dist.ProcessGroup, threading.Lock] = weakref.WeakKeyDictionary()


def _lock_of(group: SequenceGroup) -> threading.Lock:
    """One for all sessions of the same ranks."""
    return threading.Lock() if group.group is None else _LOCKS.setdefault(group.group, threading.Lock())
