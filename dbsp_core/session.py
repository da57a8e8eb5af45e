"""One transformer's attentions: masks, plans and executors by layer. What both hosts share, apart from their seams."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

import torch

from dbsp_core.agreement import on_all_ranks
from dbsp_core.attention import DualBalancedAttention
from dbsp_core.config import DbspConfig
from dbsp_core.feed import MaskFeed
from dbsp_core.grid import BlockGrid
from dbsp_core.groups import SequenceGroup
from dbsp_core.hardware import NEAREST, Hardware, load_hardware, warn_if_elsewhere
from dbsp_core.home import HomeLayout, MaskProfile
from dbsp_core.latency import AttentionShape, Topology, exchange_cost_of
from dbsp_core.mask import BlockMask
from dbsp_core.plan import Plan, make_plan, require_slots
from dbsp_core.recordings.recorder import MaskRecorder
from dbsp_core.reports.meeting import meeting_group
from dbsp_core.reports.observing import RunObserver
from dbsp_core.reuse import LaggedPlanCache, PlanCache, ReplanRule, ReuseCounters
from dbsp_core.route import Route, build_route
from dbsp_core.selection import StrategySelector, candidates
from dbsp_core.serving import kernel_merges
from dbsp_core.sources import HomeTokens
from dbsp_core.strategy import Strategy
from dbsp_kernels import Needs, choose_kernel, require_fit

__all__ = ["AttentionSession"]


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
    _feed: MaskFeed = field(init=False)
    _plans: PlanCache | LaggedPlanCache = field(init=False)
    _recorder: MaskRecorder = field(init=False)
    _size: tuple[tuple[int, int, int], int] | None = None
    _home: HomeLayout | None = None
    _hardware: Hardware | None = None
    _selector: StrategySelector | None = None
    _keys: dict[int, Hashable] = field(default_factory=dict)
    _executors: dict[Hashable, DualBalancedAttention] = field(default_factory=dict)
    _routes: dict[Hashable, Route] = field(default_factory=dict)
    """By attention, the route of a plan that its next call adopts."""
    _reached: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        if self.strategy is not None:
            self.strategy.require_world(self.group.size)
            require_fit(self.config.kernel, Needs(lse=self.strategy.ring > 1))
        self._recorder = MaskRecorder.of(self.config.record, self.group, self.layers)
        self._feed = MaskFeed(
            self.config.mask,
            self.config.dense,
            self.heads,
            self.layers,
            self.group,
            self.steps,
            count_steps=self._recorder.wanted,
            generation=self.generation,
        )
        self._plans = self._plan_cache()
        self.observer = None
        if self.config.report is not None:
            self.observer = RunObserver()
            meeting_group(self.group)  # while no rank can have failed yet: making it is a collective

    @torch.compiler.disable
    def begin(
        self,
        thw: tuple[int, int, int],
        text_tokens: int = 0,
        timestep: torch.Tensor | float | None = None,
        device: torch.device | str = "cpu",
        *,
        branch: int = 0,
        host_home: Callable[[], HomeLayout] | None = None,
    ) -> HomeLayout:
        """Starts a forward pass over a video of this token grid. returns: the layout its sequence must be sharded in.

        timestep: of the denoising, for masks that depend on the step
        device:   where the group's collectives run
        branch:   guidance pass that this one is, where the host gives each to a group of ranks of its own
        host_home: gives the layout in which the host itself shards this size of video; None: ours to choose
        Text, where the model has it in the same sequence, is sharded apart from video. A new video size drops what was
        made for the last one. Raises ValueError, on all ranks, for a size the mask source refuses.
        """
        self._reached.clear()
        self._feed.begin(thw, text_tokens, timestep, branch)
        self._recorder.begin(self._feed.moment)
        if self.observer is not None:
            self.observer.begin(timestep)
        if self._home is None or self._size != (thw, text_tokens):
            self.settle()  # while what is being planned still finds its own layout
            place = torch.device(device)
            grid = self._feed.grid(place)
            if self.strategy is not None:
                require_slots(self.strategy, grid)
            # Stripes for the longest ring serve shorter ones as well: each of their ranks has stripes side by side.
            laid_out_for = self.strategy or Strategy(1, self.group.size)
            self._home = (
                host_home()
                if host_home is not None
                else HomeLayout.named(
                    self.config.home_layout,
                    grid,
                    laid_out_for,
                    split_text=text_tokens > 0,
                    profile=self._profile(place),
                )
            )
            self._hardware = self._constants(place)
            self._selector = self._new_selector(grid, self._hardware, place) if self.strategy is None else None
            self._size = thw, text_tokens
            self._plans = self._plan_cache()
            self._keys.clear()
            self._executors.clear()
            self._routes.clear()
        self._feed.name_masks(torch.device(device))
        return self._home

    def end(self) -> int:
        """Ends a forward pass. returns: how many layers' attentions it reached."""
        return len(self._reached)

    @property
    def home(self) -> HomeLayout:
        """The layout of the current forward pass."""
        if self._home is None:
            raise RuntimeError("attention was reached before the forward pass began; attach db-SP to the transformer")
        return self._home

    @torch.compiler.disable
    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float | None = None
    ) -> torch.Tensor:
        """q, k, v: [B, H, shard, D], this rank's tokens, padding included. returns: [B, H, shard, D]."""
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        tokens = HomeTokens(q, k, self.home, self.group, scale)
        started = None if self.observer is None else self.observer.mark(q.device)
        executor = self._executor(layer, tokens)
        self._reached.add(layer)
        if executor.plan.heads == q.shape[1]:
            out = executor(q, k, v, scale=scale)
        else:
            items = (t.flatten(0, 1).unsqueeze(0) for t in (q, k, v))  # every item has masks of its own, as B·H heads
            out = executor(*items, scale=scale).view(q.shape)
        if self.observer is not None and started is not None:
            lagged = self.planning == "lagged"
            self.observer.attended(layer, self._keys[layer], executor, q, started, self._plans.latest, lagged)
        return out

    def settle(self) -> None:
        """Waits for pending plans, so that whatever is read covers every call."""
        self._plans.settle()
        if self.observer is not None:
            self.observer.settle(self._plans.latest)

    @property
    def records(self) -> dict[int, Plan]:
        """By layer, its plan with the numbers of the mask that it was last used for. Waits for pending plans."""
        self._plans.settle()
        return {layer: self._plans.latest[key] for layer, key in sorted(self._keys.items())}

    @property
    def chosen(self) -> dict[Strategy, int]:
        """How often each strategy was, where it was left to be chosen; for this size of video."""
        self._plans.settle()
        return {} if self._selector is None else dict(self._selector.chosen)

    @property
    def strategy_in_words(self) -> str:
        """For example "U4R2", or "auto: 30 U4R2, 10 U8R1"."""
        if self.strategy is not None:
            return str(self.strategy)
        return "auto: " + ", ".join(f"{count} {strategy}" for strategy, count in sorted(self.chosen.items()))

    @property
    def reuse(self) -> ReuseCounters:
        """How often plans were kept, for this size of video."""
        self._plans.settle()
        return self._plans.counters

    def _executor(self, layer: int, tokens: HomeTokens) -> DualBalancedAttention:
        """For this layer's mask: made before, for this layer or another with the same mask, or now."""
        version = self._feed.version(layer)
        if version is None:
            key: Hashable = layer, self._feed.moment.branch
            self._executors[key] = self._prepare(key, self._new_mask(key, layer, tokens, lasting=False), tokens)
        else:
            key = version, tokens.q.device
            self._drop_outdated(layer, key)
            if key not in self._executors:
                self._executors[key] = self._prepare(key, self._new_mask(key, layer, tokens, lasting=True), tokens)
        self._keys[layer] = key
        self._recorder.used(layer, key)
        return self._executors[key]

    def _drop_outdated(self, layer: int, key: Hashable) -> None:
        """Forgets the executor of a mask that this layer has no more, and no other layer has."""
        outdated = self._keys.pop(layer, None)
        if outdated != key and outdated not in self._keys.values():
            self._executors.pop(outdated, None)

    def _new_mask(self, key: Hashable, layer: int, tokens: HomeTokens, lasting: bool) -> BlockMask:
        """lasting: whether other layers or later passes may use it again"""
        mask = self._feed.mask(layer, tokens)
        self._recorder.keep(key, layer, mask, lasting)
        return mask

    def _prepare(self, key: Hashable, mask: BlockMask, tokens: HomeTokens) -> DualBalancedAttention:
        batch, heads, _, width = tokens.q.shape
        items = batch if mask.heads == heads else 1  # of a batch whose items have masks of their own
        shape = AttentionShape(items, mask.heads, mask.grid.tokens, width, tokens.q.element_size())
        plan = self._plans.plan_for(
            key,
            mask,
            functools.partial(self._make_plan, shape),
            lambda later, strategy: self._plan_with(strategy, later, shape, mask),
            functools.partial(self._prepare_route, key, self.home),
        )
        route = self._routes.pop(key, None)
        before = self._executors.get(key)
        if before is not None and before.device == tokens.q.device and plan.same_route(before.plan):
            return before.for_mask(plan, mask)
        return DualBalancedAttention.prepare(
            plan,
            mask,
            self.home,
            self.group,
            device=tokens.q.device,
            kernel=self.config.kernel,
            debug=self.config.debug,
            route=route,
        )

    def _prepare_route(self, key: Hashable, home: HomeLayout, plan: Plan) -> None:
        """In the planning thread: what the next call of this attention needs of a new plan."""
        self._routes[key] = build_route(plan, home, self.group.rank, home.shard, torch.device("cpu"))

    @property
    def planning(self) -> str:
        """ "immediate" or "lagged": what "auto" comes to for these masks."""
        if self.config.planning != "auto":
            return self.config.planning
        return "lagged" if self.config.mask.varies == "calls" else "immediate"

    def _plan_cache(self) -> PlanCache | LaggedPlanCache:
        rule = ReplanRule(self.config.replan_threshold, self.config.replan_budget)
        return LaggedPlanCache(rule, self.group) if self.planning == "lagged" else PlanCache(rule)

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
        return on_all_ranks(
            self.group,
            lambda: load_hardware(self.config.hardware or NEAREST[device.type == "cuda"]),
            device,
            lambda hardware: hardware.fingerprint,
            "the hardware file",
        )

    @property
    def _topology(self) -> Topology:
        ranks = self.group.size
        return Topology(ranks, min(ranks, int(os.environ.get("LOCAL_WORLD_SIZE", ranks))))

    def _new_selector(self, grid: BlockGrid, hardware: Hardware | None, device: torch.device) -> StrategySelector:
        if hardware is None:
            raise RuntimeError("strategies are chosen by a machine's constants, and none were loaded")
        if self.group.rank == 0:
            kernel = choose_kernel(self.config.kernel, device.type, torch.float32).name
            warn_if_elsewhere(hardware, device.type, kernel)
        strategies = candidates(self.group.size, grid, kernel_merges(self.config.kernel))
        return StrategySelector(strategies, hardware, self._topology, self.home)

    def _make_plan(self, shape: AttentionShape, mask: BlockMask, current: Plan | None) -> Plan:
        if self.strategy is not None:
            return self._plan_with(self.strategy, mask, shape, mask)
        if self._selector is None:
            raise RuntimeError("a strategy is to be chosen, but the forward pass that says among which has not begun")
        in_use = None if current is None else current.strategy
        return self._selector.choose(lambda strategy: self._plan_with(strategy, mask, shape, mask), shape, in_use)

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
        )

    def _exchange_cost(self, strategy: Strategy, shape: AttentionShape, mask: BlockMask) -> float:
        """The user's, or what the machine's constants say."""
        if self.config.exchange_cost is not None:
            return self.config.exchange_cost
        if self._hardware is None:
            return 0.0
        return exchange_cost_of(mask, strategy, shape, self._hardware, self._topology)
