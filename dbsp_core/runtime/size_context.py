"""What `strategy: auto` chooses among, and the machine's constants that it chooses by."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

import torch

from dbsp_core.comm.consistency import InputsAgreed, run_consistently
from dbsp_core.comm.groups import SequenceGroup
from dbsp_core.config import DbspConfig
from dbsp_core.cost.machine import Hardware, cost_basis, hardware_for
from dbsp_core.cost.prediction import AttentionShape, StrategySelector, candidates
from dbsp_core.layout.sequence_layout import SequenceLayout, Streams
from dbsp_core.layout.strategy import Strategy
from dbsp_core.masks.block_mask import BlockMask
from dbsp_core.masks.grid import BlockGrid, Video
from dbsp_core.masks.steps import MOST_PASSES
from dbsp_core.planning.plan import Plan, make_plan
from dbsp_core.runtime.async_plan_cache import AsyncPlanCache
from dbsp_core.runtime.mask_provider import MaskProvider
from dbsp_core.runtime.plan_cache import PlanCache, ReuseCounters
from dbsp_core.runtime.prepared import PreparedAttention
from dbsp_core.runtime.session_state import SessionObserver
from dbsp_core.sources import LocalQK
from dbsp_core.utils.process import log
from dbsp_kernels.kernel import returns_lse

__all__ = [
    "PlanKey",
    "SessionParts",
    "SizeContext",
    "agree_on_constants",
    "new_size",
    "plan_cache_of",
    "selector_of",
]


def agree_on_constants(
    config: DbspConfig, group: SequenceGroup, strategy: Strategy | None, device: torch.device
) -> Hardware | None:
    """Returns the machine's constants where strategies are chosen by them, else None. Collective then."""
    if strategy is not None:
        return None
    hardware = run_consistently(
        group,
        lambda: hardware_for(config.machine, device.type, config.kernel),
        lambda hardware: 0 if hardware is None else hardware.fingerprint,
        "the hardware file",
    )
    if group.rank == 0:
        log.info("costs are estimated by %s", cost_basis(hardware))
    return hardware


def selector_of(
    config: DbspConfig,
    group: SequenceGroup,
    nodes: tuple[int, ...],
    layout: SequenceLayout,
    hardware: Hardware | None,
    grid: BlockGrid,
) -> StrategySelector:
    """Returns the selector for masks on `grid`."""
    strategies = candidates(group.size, grid, returns_lse(config.kernel))
    return StrategySelector(strategies, hardware, nodes, layout)


class PlanKey(NamedTuple):
    """What a plan or an executor is kept for: one attention whose masks change, or one mask that has a name.

    Attributes:
        size: The videos of the forward pass.
        layer: The attention's layer.
        cfg_branch: The attention's pass, of a denoising step.
        mask: The name of the mask, whichever attention has it: layer and cfg_branch are then None.
        device: Where the executor of such a mask has its tables.
    """

    size: tuple[Video, ...]
    layer: int | None = None
    cfg_branch: int | None = None
    mask: Hashable | None = None
    device: torch.device | None = None

    def with_mask(self, name: Hashable, device: torch.device) -> PlanKey:
        """The key of a mask that this attention has, and others may have too."""
        return PlanKey(self.size, mask=name, device=device)


@dataclass(frozen=True)
class SessionParts:
    """What all sizes of a session have in common.

    Attributes:
        nodes: The node of each rank.
        strategy: How the ranks are used; None: as is predicted to be fastest, for each attention.
        masks: Its masks, begun for the size of the current forward pass.
        counters: What all sizes' plan caches count in.
        compare: Whether plans must tell what the contiguous plan would do, as reports show it.
    """

    config: DbspConfig
    group: SequenceGroup
    nodes: tuple[int, ...]
    strategy: Strategy | None
    masks: MaskProvider
    counters: ReuseCounters
    compare: bool


@dataclass
class SizeContext:
    """Plans and executors of one size of video.

    Plans are kept by attention where masks change, and by mask where they don't; executors by mask where it has a
    name, else by attention. Both are bounded: an attention has one executor, and a layer at most `MOST_PASSES`
    attentions.
    """

    session: SessionParts
    size: tuple[Video, ...]
    layout: SequenceLayout
    selector: StrategySelector | None
    """Chooses the strategy of each plan. None: the session has one strategy."""
    plans: PlanCache
    plan_keys: dict[int, PlanKey] = field(default_factory=dict)
    """What the plan of each layer's last attention is kept for."""
    inputs_agreed: InputsAgreed = field(default_factory=InputsAgreed)
    """What of q, k and v all ranks have compared."""
    _executors: dict[PlanKey, PreparedAttention] = field(default_factory=dict)
    _used: OrderedDict[PlanKey, PlanKey] = field(default_factory=OrderedDict)
    """What each attention's executor is kept for, the one used last at the end."""

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

    def executor(self, layer: int, tokens: LocalQK, observers: Sequence[SessionObserver]) -> PreparedAttention:
        """The executor for a layer's mask now: made before, for this layer or another, or now. Collective."""
        masks = self.session.masks
        attention, name = self._attention(layer), masks.cache_key(layer)
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

    def known_executor(self, layer: int, q: torch.Tensor) -> PreparedAttention | None:
        """The executor that was made for a layer's mask now. None: none was, or the mask is predicted from q and k."""
        name = self.session.masks.cache_key(layer)
        return None if name is None else self._executors.get(self._attention(layer).with_mask(name, q.device))

    def _attention(self, layer: int) -> PlanKey:
        """The key of a layer's attention now."""
        return PlanKey(self.size, layer, self.session.masks.moment.cfg_branch)

    def _keep(
        self, layer: int, attention: PlanKey, key: PlanKey, plan_key: PlanKey, executor: PreparedAttention
    ) -> None:
        """Remembers an attention's executor, and drops those that no attention has any more."""
        # Gate and coarse branch belong to one call, and each is as large as q: layers must not hold them.
        self._executors[key] = executor if executor.coarse is None else replace(executor, coarse=None)
        self.plan_keys[layer] = plan_key
        outdated = {self._used.get(attention, key)}
        self._used[attention] = key
        self._used.move_to_end(attention)
        most = self.session.masks.layers * MOST_PASSES
        while len(self._used) > most:
            oldest, its_key = self._used.popitem(last=False)
            self.plans.forget(oldest)
            outdated.add(its_key)
        for one in outdated.difference(self._used.values()):
            self._executors.pop(one, None)

    def _make(
        self, attention: PlanKey, plan_key: PlanKey, name: Hashable | None, mask: BlockMask, tokens: LocalQK
    ) -> PreparedAttention:
        config, device = self.session.config, tokens.q.device
        make = partial(self._new_plan, AttentionShape.of(tokens.q, mask.heads, mask.grid.tokens))
        plain = mask if mask.coarse is None else replace(mask, coarse=None)
        plan = self.plans.plan_for(plan_key, plain, make, name).plan  # a thread may hold the mask
        used = self._used.get(attention)
        before = None if used is None else self._executors.get(used)
        if before is not None and before.device == device and plan.same_routes(before.plan):
            return before.for_mask(plan, mask, mark=config.debug)
        group, kernel, mark = self.session.group, config.kernel, config.debug
        return PreparedAttention.of(plan, mask, self.layout, group, kernel, device=device, mark=mark)

    def _new_plan(self, shape: AttentionShape, mask: BlockMask, current: Plan | None) -> Plan:
        """Makes a plan for a mask, where `current` is in use. See `plan_cache.MakePlan`."""
        config, strategy = self.session.config, self.session.strategy
        how = partial(make_plan, mask, layout=self.layout, compare=self.session.compare)
        make = partial(how, planner=config.planner, keys=config.keys, precision=config.precision)
        if strategy is not None:
            return make(strategy)
        if self.selector is None:
            raise RuntimeError("a strategy is to be chosen, but nothing says among which")
        return self.selector.choose(make, shape, None if current is None else current.strategy)


def new_size(
    session: SessionParts,
    hardware: Hardware | None,
    size: tuple[Video, ...],
    device: torch.device,
    streams: Streams | SequenceLayout,
) -> SizeContext:
    """The context of a size for which nothing was made yet. Collective: all ranks must plan by the same.

    Args:
        session: Its masks are begun for this size.
        hardware: The constants that ranks have agreed on.
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
    if isinstance(streams, SequenceLayout):
        layout = streams
    else:
        layout = _layout(session, grid, streams)
    selector = None
    if strategy is None:
        make = partial(selector_of, config, group, session.nodes, layout, hardware, grid)
        selector = run_consistently(group, make)
    return SizeContext(session, size, layout, selector, plan_cache_of(session))


def plan_cache_of(session: SessionParts) -> PlanCache:
    """An empty one, as the configuration asks for."""
    common = session.config.reuse, session.counters, session.compare
    if session.config.effective_planning == "async":
        return AsyncPlanCache(*common, group=session.group)
    return PlanCache(*common)


def _layout(session: SessionParts, grid: BlockGrid, streams: Streams) -> SequenceLayout:
    # Stripes for the longest ring serve shorter ones as well: each of their ranks has stripes side by side.
    strategy = session.strategy or Strategy(1, session.group.size)
    return SequenceLayout.named(session.config.layout, grid, strategy, streams=streams)
