"""What a session keeps for one size of video: layout, plans, executors; and how a new size gets them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

import torch

from dbsp_core.comm.groups import SequenceGroup
from dbsp_core.comm.inputs import InputsAgreed
from dbsp_core.config.config import DbspConfig
from dbsp_core.cost.latency import AttentionShape, Topology
from dbsp_core.cost.layout_choice import fastest_layout
from dbsp_core.layout.learned import MaskProfile
from dbsp_core.layout.sequence_layout import SequenceLayout, Streams
from dbsp_core.layout.strategy import Strategy
from dbsp_core.masks.block_mask import BlockMask
from dbsp_core.masks.grid import BlockGrid
from dbsp_core.masks.remainder import CoarseBranch
from dbsp_core.masks.schedule import MOST_PASSES
from dbsp_core.masks.video import Video
from dbsp_core.planning.plan import Plan, require_slots
from dbsp_core.runtime.executor import AttentionExecutor
from dbsp_core.runtime.session.async_plan_cache import AsyncPlanCache
from dbsp_core.runtime.session.mask_provider import MaskProvider
from dbsp_core.runtime.session.observer import SessionObserver
from dbsp_core.runtime.session.plan_cache import PlanCache, SyncPlanCache
from dbsp_core.runtime.session.plan_maker import ConfiguredPlanMaker, Machine, PlanSettings, strategies_of
from dbsp_core.runtime.session.replan_rule import ReplanRule, ReuseCounters
from dbsp_core.sources import LocalQK

__all__ = ["FEW_STEPS", "PlanKey", "SessionParts", "SizeContext", "new_size", "plan_cache_of"]

FEW_STEPS = 8
"""Denoisings of at most as many steps keep a plan for each: the next video's masks at that step are then closer
than the last step's."""


class PlanKey(NamedTuple):
    """What a plan or an executor is kept for: one attention whose masks change, or one mask that has a name.

    Attributes:
        size: The videos of the forward pass.
        batch: Items of the batch, where plans depend on it, under a memory limit; else 0.
        gradients: Whether what backward needs is kept, where plans depend on it, under a memory limit; else False.
        layer: The attention's layer.
        cfg_branch: The attention's pass, of a denoising step.
        step: Step of a denoising of few, so that a plan is kept for the same step of the next video. None: any step.
        mask: The name of the mask, whichever attention has it: layer, cfg_branch and step are then None.
        device: Where the executor of such a mask has its tables.
    """

    size: tuple[Video, ...]
    batch: int = 0
    gradients: bool = False
    layer: int | None = None
    cfg_branch: int | None = None
    step: int | None = None
    mask: Hashable | None = None
    device: torch.device | None = None

    def with_mask(self, name: Hashable, device: torch.device) -> PlanKey:
        """The key of a mask that this attention has, and others may have too."""
        return PlanKey(self.size, self.batch, self.gradients, mask=name, device=device)

    @property
    def a_step_earlier(self) -> PlanKey | None:
        """The same attention a step earlier, where steps are distinguished."""
        return self._replace(step=self.step - 1) if self.step else None


@dataclass(frozen=True)
class SessionParts:
    """What all sizes of a session have in common.

    Attributes:
        strategy: How the ranks are used; None: as is predicted to be fastest, for each attention.
        masks: Its masks, begun for the size of the current forward pass.
        counters: What all sizes' plan caches count in.
        compare: Whether plans must tell what the contiguous plan would do, as reports show it.
    """

    config: DbspConfig
    group: SequenceGroup
    topology: Topology
    strategy: Strategy | None
    masks: MaskProvider
    counters: ReuseCounters
    compare: bool

    @property
    def few_steps(self) -> bool:
        """Whether each step keeps plans of its own, for the next video."""
        steps = None if self.config.mask.changes == "never" else self.masks.steps()
        return steps is not None and steps <= FEW_STEPS


@dataclass
class SizeContext:
    """Plans and executors of one size of video.

    Plans are kept by attention where masks change, and by mask where they don't; executors by mask where it has a
    name, else by attention. Both are bounded: an attention has one executor, and a layer at most `MOST_PASSES`
    attentions, times `FEW_STEPS` where steps are distinguished.
    """

    session: SessionParts
    size: tuple[Video, ...]
    settings: PlanSettings
    plans: PlanCache
    plan_keys: dict[int, PlanKey] = field(default_factory=dict)
    """What the plan of each layer's last attention is kept for."""
    inputs_agreed: InputsAgreed = field(default_factory=InputsAgreed)
    """What of q, k and v all ranks have compared."""
    _executors: dict[PlanKey, AttentionExecutor] = field(default_factory=dict)
    _used: OrderedDict[PlanKey, PlanKey] = field(default_factory=OrderedDict)
    """What each attention's executor is kept for, the one used last at the end."""

    @property
    def layout(self) -> SequenceLayout:
        return self.settings.layout

    @property
    def records(self) -> dict[int, Plan]:
        """Each layer's plan, with the numbers of the mask that it was last used for. Waits for pending plans."""
        self.plans.flush()
        return {layer: self.plans.latest[key] for layer, key in sorted(self.plan_keys.items())}

    def flush(self, observers: Sequence[SessionObserver]) -> None:
        """Waits for pending plans, so that whatever is read covers every call."""
        self.plans.flush()
        for observer in observers:
            observer.flush(self.plans.latest)

    def executor(self, layer: int, tokens: LocalQK, observers: Sequence[SessionObserver]) -> AttentionExecutor:
        """The executor for a layer's mask now: made before, for this layer or another, or now. Collective."""
        masks = self.session.masks
        attention, name = self._attention(layer, tokens.q, tokens.k), masks.cache_key(layer)
        key = attention if name is None else attention.with_mask(name, tokens.q.device)
        plan_key = attention if masks.changes(layer) else key
        executor = None if name is None else self._executors.get(key)
        if executor is None or not self.plans.count_reuse(plan_key, executor.plan, name):
            mask = masks.mask(layer, tokens)
            for observer in observers:
                observer.mask_made(key, layer, mask, name is not None)
            executor = self._make(attention, plan_key, name, mask, tokens)
        self._keep(layer, attention, key, plan_key, executor)
        for observer in observers:
            observer.mask_used(layer, key)
        return executor

    def known_executor(self, layer: int, q: torch.Tensor, k: torch.Tensor) -> AttentionExecutor | None:
        """The executor that was made for a layer's mask now. None: none was, or the mask is predicted from q and k."""
        name = self.session.masks.cache_key(layer)
        return None if name is None else self._executors.get(self._attention(layer, q, k).with_mask(name, q.device))

    def _attention(self, layer: int, q: torch.Tensor, k: torch.Tensor) -> PlanKey:
        """The key of a layer's attention now."""
        moment = self.session.masks.moment
        step = moment.step if self.session.few_steps else None
        if self.settings.memory is None:
            return PlanKey(self.size, layer=layer, cfg_branch=moment.cfg_branch, step=step)
        return PlanKey(self.size, len(q), _keeps_gradients(q, k), layer, moment.cfg_branch, step)

    def _keep(
        self, layer: int, attention: PlanKey, key: PlanKey, plan_key: PlanKey, executor: AttentionExecutor
    ) -> None:
        """Remembers an attention's executor, and drops those that no attention has any more."""
        # Gate and coarse branch belong to one call, and each is as large as q: layers must not hold them.
        self._executors[key] = executor if executor.coarse is None else replace(executor, coarse=None)
        self.plan_keys[layer] = plan_key
        outdated = {self._used.get(attention, key)}
        self._used[attention] = key
        self._used.move_to_end(attention)
        most = self.session.masks.layers * MOST_PASSES * (1 if attention.step is None else FEW_STEPS)
        while len(self._used) > most:
            oldest, its_key = self._used.popitem(last=False)
            self.plans.forget(oldest)
            outdated.add(its_key)
        for one in outdated.difference(self._used.values()):
            self._executors.pop(one, None)

    def _make(
        self, attention: PlanKey, plan_key: PlanKey, name: Hashable | None, mask: BlockMask, tokens: LocalQK
    ) -> AttentionExecutor:
        config, device, earlier = self.session.config, tokens.q.device, attention.a_step_earlier
        shape = AttentionShape.of(tokens.q, mask.heads, mask.grid.tokens)
        maker = ConfiguredPlanMaker(self.settings, shape, _keeps_gradients(tokens.q, tokens.k))
        if plan_key == attention and earlier is not None:
            self.plans.begin_with(attention, earlier)
        plain = replace(mask, remainder=None) if isinstance(mask.remainder, CoarseBranch) else mask
        planned = self.plans.plan_for(plan_key, plain, maker, name)  # a thread may hold the mask for some calls
        plan, used = planned.plan, self._used.get(attention) or (earlier and self._used.get(earlier))
        before = None if used is None else self._executors.get(used)
        if before is not None and before.device == device and plan.assignment.equals(before.part.assignment):
            return before.for_mask(plan, mask, mark=config.debug)
        part = (planned.part or maker.rank_plan(plan.assignment)).to(device)
        return AttentionExecutor.of_part(part, plan, mask, self.session.group, config.kernel, mark=config.debug)


def _keeps_gradients(q: torch.Tensor, k: torch.Tensor) -> bool:
    return q.requires_grad or k.requires_grad


def new_size(
    session: SessionParts,
    machine: Machine,
    size: tuple[Video, ...],
    device: torch.device,
    streams: Streams | SequenceLayout,
) -> SizeContext:
    """The context of a size for which nothing was made yet. Collective: all ranks must plan by the same.

    Args:
        session: Its masks are begun for this size.
        machine: What ranks have agreed on.
        size: The videos of a forward pass.
        device: Where the group's collectives run.
        streams: How a rank's text and video follow one another in the layout that is chosen here, or a layout.

    Returns:
        A context without plans.

    Raises:
        UserError: On all ranks, for a size that the mask source or the strategy refuses.
    """
    config, group, strategy = session.config, session.group, session.strategy
    grid = session.masks.grid()  # which all ranks have alike
    if strategy is not None:
        require_slots(strategy, grid)
    if isinstance(streams, SequenceLayout):
        layout = streams
    else:
        layout = _layout(session, machine, grid, streams, device)
    settings = PlanSettings.of(
        config, group, session.topology, strategy, layout, machine, grid, device, session.compare
    )
    return SizeContext(session, size, settings, plan_cache_of(session))


def plan_cache_of(session: SessionParts) -> PlanCache:
    """An empty one, as the configuration asks for."""
    rule = ReplanRule(session.config.reuse.threshold, session.config.reuse.budget)
    if session.config.effective_planning == "async":
        return AsyncPlanCache(rule, session.counters, session.compare, group=session.group)
    return SyncPlanCache(rule, session.counters, session.compare)


def _layout(
    session: SessionParts, machine: Machine, grid: BlockGrid, streams: Streams, device: torch.device
) -> SequenceLayout:
    config, group, masks = session.config, session.group, session.masks
    known = masks.static_masks() if config.effective_layout == "learned" else None
    profile = None if known is None else MaskProfile.of(known)

    def named(name: str, grid: BlockGrid, strategy: Strategy) -> SequenceLayout:
        return SequenceLayout.named(name, grid, strategy, streams=streams, profile=profile)

    if not config.searches_layout or group.size == 1:
        # Stripes for the longest ring serve shorter ones as well: each of their ranks has stripes side by side.
        return named(config.effective_layout, grid, session.strategy or Strategy(1, group.size))
    return fastest_layout(
        masks.masks_now(),
        strategies_of(config, group, session.strategy, grid),
        partial(named, "local"),
        config.planner,
        machine.hardware,
        session.topology,
        element_bytes=2 if device.type == "cuda" else 4,
        precision=config.exchange.precision,
    )
