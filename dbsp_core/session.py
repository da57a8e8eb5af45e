"""One transformer's attentions: masks, plans and executors by layer. What both hosts share, apart from their seams."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from dbsp_core.attention import DualBalancedAttention
from dbsp_core.config import DbspConfig
from dbsp_core.grid import BlockGrid
from dbsp_core.groups import SequenceGroup
from dbsp_core.home import HomeLayout, MaskProfile
from dbsp_core.mask import BlockMask
from dbsp_core.plan import Plan, make_plan, require_slots
from dbsp_core.reuse import PlanCache
from dbsp_core.sources import MaskRequest
from dbsp_core.strategy import Strategy

__all__ = ["AttentionSession", "LayerRecord"]


@dataclass(frozen=True, eq=False)
class LayerRecord:
    """What was last done for a layer."""

    plan: Plan
    density: float


@dataclass(frozen=True)
class _Shape:
    """What a forward pass fixes for all its attentions."""

    thw: tuple[int, int, int]
    text_tokens: int
    grid: BlockGrid
    home: HomeLayout


@dataclass
class AttentionSession:
    """State of one transformer: `begin` at every forward pass, then `attend` once a layer.

    strategy: how the group's ranks are used
    heads:    attention heads of every layer
    layers:   number of layers
    Raises ValueError at construction when strategy and group don't fit.
    """

    config: DbspConfig
    group: SequenceGroup
    strategy: Strategy
    heads: int
    layers: int
    records: dict[int, LayerRecord] = field(default_factory=dict)
    _shape: _Shape | None = None
    _plans: PlanCache = field(init=False)
    _latest: tuple[BlockMask, DualBalancedAttention] | None = None
    _executors: dict[tuple[int, torch.device], DualBalancedAttention] = field(default_factory=dict)
    _calls: dict[int, int] = field(default_factory=dict)
    _reached: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.strategy.require_world(self.group.size)
        self._plans = PlanCache(self.config.replan_threshold)

    def begin(self, thw: tuple[int, int, int], text_tokens: int = 0) -> HomeLayout:
        """Starts a forward pass over a video of this token grid. returns: the layout its sequence must be sharded in.

        Text, where the model has it in the same sequence, is sharded apart from video. A new video size drops what was
        made for the last one. Raises ValueError for a size the mask source refuses.
        """
        if self._shape is None or (self._shape.thw, self._shape.text_tokens) != (thw, text_tokens):
            grid = self.config.mask.grid(MaskRequest(0, self.heads, thw, text_tokens))
            require_slots(self.strategy, grid)
            profile = self._profile(thw, text_tokens) if self.config.home_layout == "learned" else None
            home = HomeLayout.named(
                self.config.home_layout, grid, self.strategy, split_text=text_tokens > 0, profile=profile
            )
            self._shape = _Shape(thw, text_tokens, grid, home)
            self._plans = PlanCache(self.config.replan_threshold)
            self._latest = None
            self._executors.clear()
            self.records.clear()
        self._reached.clear()
        return self._shape.home

    def end(self) -> int:
        """Ends a forward pass. returns: how many layers' attentions it reached."""
        return len(self._reached)

    @property
    def home(self) -> HomeLayout:
        """The layout of the current forward pass."""
        return self._require_shape().home

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float | None = None
    ) -> torch.Tensor:
        """q, k, v: [B, H, shard, D], this rank's tokens, padding included. returns: [B, H, shard, D]."""
        shape = self._require_shape()
        executor = self._executors.get((layer, q.device))
        if executor is None or not self.config.mask.static:
            mask = self._mask(layer, shape)
            executor = self._executor(layer, mask, shape, q)
            self._executors[layer, q.device] = executor
        self._calls[layer] = self._calls.get(layer, 0) + 1
        self._reached.add(layer)
        return executor(q, k, v, scale=scale)

    def _profile(self, thw: tuple[int, int, int], text_tokens: int) -> MaskProfile | None:
        """Of all layers' masks, for layout "learned"; None where masks are not known before they are used."""
        source = self.config.mask
        if not source.static:
            return None
        requests = (MaskRequest(layer, self.heads, thw, text_tokens) for layer in range(self.layers))
        return MaskProfile.of(source.mask(request) for request in requests)

    def _require_shape(self) -> _Shape:
        if self._shape is None:
            raise RuntimeError("attention was reached before the forward pass began; attach db-SP to the transformer")
        return self._shape

    def _mask(self, layer: int, shape: _Shape) -> BlockMask:
        request = MaskRequest(layer, self.heads, shape.thw, shape.text_tokens, self._calls.get(layer, 0))
        return self.config.mask.mask(request)

    def _executor(self, layer: int, mask: BlockMask, shape: _Shape, q: torch.Tensor) -> DualBalancedAttention:
        if self._latest is not None and self._latest[0] is mask and self._latest[1].device == q.device:
            executor = self._latest[1]  # layers that share a mask share its plan and tables
            self.records[layer] = LayerRecord(executor.plan, mask.density)
            return executor
        plan = self._plans.plan_for(layer, mask, lambda m: self._make_plan(m, shape.home))
        self.records[layer] = LayerRecord(plan, mask.density)
        executor = DualBalancedAttention.prepare(
            plan,
            mask,
            shape.home,
            self.group,
            device=q.device,
            kernel=self.config.kernel,
            debug=self.config.debug,
        )
        self._latest = mask, executor
        return executor

    def _make_plan(self, mask: BlockMask, home: HomeLayout) -> Plan:
        config = self.config
        return make_plan(
            mask,
            self.strategy,
            config.planner,
            home=home,
            reward=config.reward,
            head_cap=config.head_cap,
            tolerance=config.tolerance,
            exchange_cost=config.exchange_cost,
        )
