"""One transformer's attentions: masks, plans and executors by layer. What both hosts share, apart from their seams."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

import torch

from dbsp_core.attention import DualBalancedAttention
from dbsp_core.config import DbspConfig
from dbsp_core.feed import MaskFeed
from dbsp_core.groups import SequenceGroup
from dbsp_core.home import HomeLayout, MaskProfile
from dbsp_core.mask import BlockMask
from dbsp_core.plan import Plan, make_plan, require_slots
from dbsp_core.reuse import LaggedPlanCache, PlanCache, ReuseCounters
from dbsp_core.sources import HomeTokens
from dbsp_core.strategy import Strategy

__all__ = ["AttentionSession"]


@dataclass
class AttentionSession:
    """State of one transformer: `begin` at every forward pass, then `attend` once a layer.

    strategy: how the group's ranks are used
    heads:    attention heads of every layer
    layers:   number of layers
    steps:    tells how many denoising steps there will be, where the host knows
    Raises ValueError at construction when strategy and group don't fit.
    """

    config: DbspConfig
    group: SequenceGroup
    strategy: Strategy
    heads: int
    layers: int
    steps: Callable[[], int | None] = lambda: None
    _feed: MaskFeed = field(init=False)
    _plans: PlanCache | LaggedPlanCache = field(init=False)
    _size: tuple[tuple[int, int, int], int] | None = None
    _home: HomeLayout | None = None
    _keys: dict[int, Hashable] = field(default_factory=dict)
    _executors: dict[Hashable, DualBalancedAttention] = field(default_factory=dict)
    _reached: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.strategy.require_world(self.group.size)
        self._feed = MaskFeed(self.config.mask, self.config.dense, self.heads, self.layers, self.group, self.steps)
        self._plans = self._plan_cache()

    @torch.compiler.disable
    def begin(
        self,
        thw: tuple[int, int, int],
        text_tokens: int = 0,
        timestep: torch.Tensor | float | None = None,
        device: torch.device | str = "cpu",
    ) -> HomeLayout:
        """Starts a forward pass over a video of this token grid. returns: the layout its sequence must be sharded in.

        timestep: of the denoising, for masks that depend on the step
        device:   where the group's collectives run
        Text, where the model has it in the same sequence, is sharded apart from video. A new video size drops what was
        made for the last one. Raises ValueError, on all ranks, for a size the mask source refuses.
        """
        self._reached.clear()
        self._feed.begin(thw, text_tokens, timestep)
        if self._home is None or self._size != (thw, text_tokens):
            place = torch.device(device)
            grid = self._feed.grid(place)
            require_slots(self.strategy, grid)
            self._home = HomeLayout.named(
                self.config.home_layout, grid, self.strategy, split_text=text_tokens > 0, profile=self._profile(place)
            )
            self._size = thw, text_tokens
            self._plans = self._plan_cache()
            self._keys.clear()
            self._executors.clear()
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
        executor = self._executor(layer, tokens)
        self._reached.add(layer)
        if executor.plan.heads == q.shape[1]:
            return executor(q, k, v, scale=scale)
        items = (t.flatten(0, 1).unsqueeze(0) for t in (q, k, v))  # every item has masks of its own, as B·H heads
        return executor(*items, scale=scale).view(q.shape)

    @property
    def records(self) -> dict[int, Plan]:
        """By layer, its plan with the numbers of the mask that it was last used for. Waits for pending plans."""
        self._plans.settle()
        return {layer: self._plans.latest[key] for layer, key in sorted(self._keys.items())}

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
            self._executors[key] = self._prepare(key, self._feed.mask(layer, tokens), tokens)
        else:
            key = version, tokens.q.device
            self._drop_outdated(layer, key)
            if key not in self._executors:
                self._executors[key] = self._prepare(key, self._feed.mask(layer, tokens), tokens)
        self._keys[layer] = key
        return self._executors[key]

    def _drop_outdated(self, layer: int, key: Hashable) -> None:
        """Forgets the executor of a mask that this layer has no more, and no other layer has."""
        outdated = self._keys.pop(layer, None)
        if outdated != key and outdated not in self._keys.values():
            self._executors.pop(outdated, None)

    def _prepare(self, key: Hashable, mask: BlockMask, tokens: HomeTokens) -> DualBalancedAttention:
        plan = self._plans.plan_for(key, mask, self._make_plan)
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
        )

    def _plan_cache(self) -> PlanCache | LaggedPlanCache:
        planning = self.config.planning
        if planning == "auto":
            planning = "lagged" if self.config.mask.varies == "calls" else "immediate"
        threshold = self.config.replan_threshold
        return LaggedPlanCache(threshold, self.group) if planning == "lagged" else PlanCache(threshold)

    def _profile(self, device: torch.device) -> MaskProfile | None:
        """Of all layers' masks, for layout "learned"; None where masks are not known before they are used."""
        if self.config.home_layout != "learned":
            return None
        masks = self._feed.static_masks(device)
        return None if masks is None else MaskProfile.of(masks)

    def _make_plan(self, mask: BlockMask) -> Plan:
        config = self.config
        return make_plan(
            mask,
            self.strategy,
            config.planner,
            home=self.home,
            reward=config.reward,
            head_cap=config.head_cap,
            tolerance=config.tolerance,
            exchange_cost=config.exchange_cost,
        )
