"""State for one size of video: its layout, the plans in use, and prepared attentions."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import torch

from dbsp_core.comm.consistency import QKV, CheckedInputs, InputKind, problem_of_inputs, run_consistently
from dbsp_core.comm.groups import SequenceGroup
from dbsp_core.config import DbspConfig
from dbsp_core.cost.machine import cost_basis, hardware_for, kernel_order
from dbsp_core.cost.prediction import AttentionShape, StrategySelector, candidates
from dbsp_core.layout.sequence_layout import SequenceLayout, Streams
from dbsp_core.layout.strategy import Strategy
from dbsp_core.masks.block_mask import BlockMask
from dbsp_core.masks.grid import BlockGrid, Video
from dbsp_core.masks.steps import MOST_PASSES
from dbsp_core.planning.plan import Plan, make_plan, plan_from_counts
from dbsp_core.runtime.mask_provider import DENSE, MaskProvider
from dbsp_core.runtime.plan_keeper import PlanKeeper, PlanUse, ReuseStatistics
from dbsp_core.runtime.prepared import PreparedAttention
from dbsp_core.runtime.session_state import SessionObserver
from dbsp_core.sources import LocalQK
from dbsp_core.utils.errors import UserError
from dbsp_core.utils.process import log
from dbsp_kernels import Kernel, KernelRequirements, choose_kernel
from dbsp_kernels.kernel import supports

SizeKey = tuple[tuple[Video, ...], int]
"""Videos of a forward pass, and the fingerprint of the layout if one was given, else 0."""


@dataclass(eq=False)
class SizeContext:
    """Plans and prepared attentions of one size of video.

    Plans are kept by attention (layer and CFG pass) if masks change, else by mask. Prepared attentions are kept
    by mask if it is known beforehand, else by attention. Both are bounded: an attention has one prepared attention,
    and a layer at most `MOST_PASSES` attentions.

    Attributes:
        strategy: Strategy of the ranks, or None if `selector` chooses a strategy for each plan.
        masks: The session's masks, begun for this size.
        kernel: The configuration's kernel, or for "auto" those that were measured here and then "auto".
        checked_inputs: Kinds of q, k and v that all ranks have compared.
    """

    config: DbspConfig
    group: SequenceGroup
    strategy: Strategy | None
    masks: MaskProvider
    observers: Sequence[SessionObserver]
    key: SizeKey
    grid: BlockGrid
    layout: SequenceLayout
    selector: StrategySelector | None
    keeper: PlanKeeper
    kernel: str
    checked_inputs: CheckedInputs = field(default_factory=CheckedInputs)
    _no_gradients: str | None = field(init=False)
    _plan_keys: dict[int, Hashable] = field(default_factory=dict)
    """What the plan of each layer's last attention is kept by."""
    _prepared: dict[Hashable, PreparedAttention] = field(default_factory=dict)
    _again: dict[Plan, int] = field(default_factory=dict)
    """Calls of plans that are kept by mask, since they were last counted."""
    _used: OrderedDict[Hashable, Hashable] = field(default_factory=OrderedDict)
    """The key of each attention's prepared attention, the one used last at the end."""

    @classmethod
    def from_config(
        cls,
        config: DbspConfig,
        group: SequenceGroup,
        strategy: Strategy | None,
        masks: MaskProvider,
        observers: Sequence[SessionObserver],
        key: SizeKey,
        device: torch.device,
        streams: Streams | SequenceLayout,
        nodes: tuple[int, ...],
        statistics: ReuseStatistics,
    ) -> SizeContext:
        """Makes the context of a new size. Raises ValueError for one that the mask source rejects.

        Args:
            streams: See `AttentionSession.begin`.
            nodes: The node of each rank.
            statistics: Sums over the calls of all sizes.
        """
        grid, layout, selector = masks.grid(), streams, None
        if not isinstance(layout, SequenceLayout):
            # Stripes for the longest ring fit shorter ones as well: each of their ranks has adjacent stripes.
            layout = SequenceLayout.named(config.layout, grid, strategy or Strategy(1, group.size), streams=layout)
        if strategy is None:
            hardware = hardware_for(config.machine, device.type, config.kernel)
            if group.rank == 0:
                log.info("cost model: %s", cost_basis(hardware))
            strategies = candidates(group.size, grid, supports(config.kernel, KernelRequirements(lse=True)))
            selector = StrategySelector(strategies, hardware, nodes, layout)
        keeper = PlanKeeper(config.reuse, any(observer.compares for observer in observers), statistics)
        kernel = kernel_order(config.kernel, config.machine, device)
        return cls(config, group, strategy, masks, observers, key, grid, layout, selector, keeper, kernel)

    def __post_init__(self) -> None:
        self._no_gradients = self.config.comm_dtype.no_gradients

    def problem_of(self, qkv: QKV, tokens: int) -> UserError | None:
        """Returns what is wrong with this rank's q, k and v, of which each rank must have `tokens`; or None."""
        heads = self.masks.heads
        why = f"the model has {heads} heads, and the layout gives every rank {tokens} tokens"
        problem = problem_of_inputs(*qkv, heads, tokens, why, self._no_gradients)
        return None if problem is None else UserError(problem)

    def choose_kernel(self, kind: InputKind) -> Kernel:
        """Chooses a kernel for inputs of a kind before an attention is prepared. Raises UserError without one."""
        device, dtype, head_dim, gradients = kind
        merged = self.strategy is not None and self.strategy.ring > 1
        blocks = self.grid.block_q, self.grid.block_k
        needs = KernelRequirements(blocks, head_dim, lse=merged or gradients, backward=gradients)
        return choose_kernel(self.kernel, device, dtype, needs)

    @property
    def hardware_fingerprint(self) -> int:
        """A number that is equal on ranks that choose strategies by the same constants."""
        hardware = None if self.selector is None else self.selector.hardware
        return 0 if hardware is None else hardware.fingerprint

    @property
    def records(self) -> dict[int, Plan]:
        """Each layer's plan, with the numbers of the mask that it was last used for. Waits for counts under way."""
        return {layer: self.keeper.last_used(key) for layer, key in sorted(self._plan_keys.items())}

    def known(self, layer: int, device: torch.device) -> PreparedAttention | None:
        """Returns what was prepared for a layer's mask now, or None if nothing was or the mask is predicted."""
        name = self.name_of(layer)
        return None if name is None else self._prepared.get((self.key[0], name, device))

    def name_of(self, layer: int) -> Hashable | None:
        """Returns the cache key of a layer's mask now, or None if it is predicted."""
        names = self.masks.names
        return names[layer] if layer in names else self.masks.cache_key(layer)

    def prepare_known(self, layer: int, q: torch.Tensor) -> tuple[PreparedAttention, PlanUse]:
        """Prepares a layer's attention for a mask that is known beforehand.

        Not collective: ranks compare the result before they keep it by `use_known`.
        """
        key, plan_key = self._keys(layer, q.device)
        mask = self.masks.mask(layer)
        for observer in self.observers:
            observer.mask_made(key, layer, mask, True)
        keys, shape = self.config.keys, AttentionShape.from_q(q, mask.heads)

        def make(_: np.ndarray, current: Plan | None) -> Plan:
            return self._new_plan(partial(make_plan, mask, keys=keys), shape, current)

        use = self.keeper.plan_known(plan_key, mask, make)
        return self._prepare(layer, use.plan, mask, q.device, fingerprint=True), use

    def use_known(self, layer: int, prepared: PreparedAttention, use: PlanUse | None = None) -> PlanUse:
        """Counts one more call with a mask that is known beforehand, and keeps what was prepared for it.

        Args:
            use: The plan's first use, or None if it is used again.
        """
        key, plan_key = self._keys(layer, prepared.table_layout.rows.device)
        if use is None and plan_key == key:
            use = PlanUse(prepared.plan, False, prepared.plan)
            self._again[prepared.plan] = self._again.get(prepared.plan, 0) + 1
        else:
            use = use or PlanUse(prepared.plan, False, prepared.plan)
            self.keeper.use(plan_key, use)
        self._keep(layer, key, plan_key, prepared)
        return use

    def settle(self) -> None:
        """Waits for counts under way, so that statistics cover every call."""
        self.sum_up()
        self.keeper.settle()

    def sum_up(self) -> None:
        """Adds calls with plans that are kept by mask to the statistics."""
        for plan, calls in self._again.items():
            self.keeper.statistics.calls += calls
            self.keeper.statistics.add(plan, calls)
        self._again.clear()

    def prepare_predicted(self, layer: int, tokens: LocalQK) -> tuple[PreparedAttention, PlanUse]:
        """Predicts the mask of a layer's call, and prepares its attention under the plan in use. Collective.

        Ranks agree on a new plan and on its routes, which one of them may be unable to make.
        """
        key, _ = self._keys(layer, tokens.q.device)
        mask = self.masks.mask(layer, tokens)
        for observer in self.observers:
            observer.mask_made(key, layer, mask, False)
        grid, shape, control = mask.grid, AttentionShape.from_q(tokens.q, mask.heads), self.group.control()

        def make(rows: np.ndarray, current: Plan | None) -> Plan:
            new = partial(self._new_plan, partial(plan_from_counts, rows, grid), shape, current)
            return run_consistently(control, new, lambda plan: plan.fingerprint, "the plan")

        use = self.keeper.plan_predicted(key, mask, make, self.masks.moment.generation)
        before = self._with_routes_of(layer, use.plan, tokens.q.device)
        if before is None:
            parts = layer, use.plan, mask, tokens.q.device
            prepared = run_consistently(control, partial(self._prepare, *parts, fingerprint=self.config.debug))
        else:
            prepared = before.for_mask(use.plan, mask, fingerprint=self.config.debug)
        self._keep(layer, key, key, prepared)
        return prepared, use

    def _keys(self, layer: int, device: torch.device) -> tuple[Hashable, Hashable]:
        """Returns the keys of a layer's prepared attention and of its plan, for its mask now."""
        attention, name = self._attention(layer), self.name_of(layer)
        key = attention if name is None else (self.key[0], name, device)
        return key, attention if self.masks.changing and name != DENSE else key

    def _attention(self, layer: int) -> Hashable:
        """Returns the key of a layer's attention now."""
        return self.key[0], layer, self.masks.moment.cfg_branch

    def _new_plan(self, make: partial[Plan], shape: AttentionShape, current: Plan | None) -> Plan:
        """Makes a plan, of the strategy that is predicted to be fastest if none is set."""
        config, compare = self.config, self.keeper.compare
        options = {"planner": config.planner, "layout": self.layout, "precision": config.precision}
        make = partial(make, **options, compare=compare)
        if self.selector is None:
            return make(self.strategy)
        return self.selector.choose(make, shape, None if current is None else current.strategy)

    def _prepare(
        self, layer: int, plan: Plan, mask: BlockMask, device: torch.device, *, fingerprint: bool
    ) -> PreparedAttention:
        """Prepares an attention, with the routes of the attention's last call if the plan has the same."""
        before = self._with_routes_of(layer, plan, device)
        if before is not None:
            return before.for_mask(plan, mask, fingerprint=fingerprint)
        where = self.layout, self.group, self.kernel
        return PreparedAttention.from_plan(plan, mask, *where, device=device, fingerprint=fingerprint)

    def _with_routes_of(self, layer: int, plan: Plan, device: torch.device) -> PreparedAttention | None:
        """Returns what the attention's last call was prepared with, if the plan has the same routes."""
        last = self._used.get(self._attention(layer))
        before = None if last is None else self._prepared.get(last)
        if before is None or before.device != device or not plan.same_routes(before.plan):
            return None
        return before

    def _keep(self, layer: int, key: Hashable, plan_key: Hashable, prepared: PreparedAttention) -> None:
        """Remembers what an attention uses, and drops what no attention uses any more."""
        # Gate and coarse branch belong to one call, and each is as large as q: layers must not hold them.
        self._prepared[key] = prepared if prepared.coarse is None else replace(prepared, coarse=None)
        self._plan_keys[layer] = plan_key
        attention = self._attention(layer)
        before = self._used.get(attention, key)
        outdated = set() if before == key else {before}
        self._used[attention] = key
        self._used.move_to_end(attention)
        while len(self._used) > self.masks.layers * MOST_PASSES:
            oldest, its_key = self._used.popitem(last=False)
            self.keeper.forget(oldest)
            outdated.add(its_key)
        for unused in outdated and outdated.difference(self._used.values()):
            self._prepared.pop(unused, None)
        for observer in self.observers:
            observer.mask_used(layer, key)
