"""What a session keeps for one size of video: layout, plans, executors."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from dbsp_core.cost.latency import AttentionShape
from dbsp_core.layout.sequence_layout import SequenceLayout
from dbsp_core.masks.block_mask import BlockMask
from dbsp_core.planning.plan import Plan
from dbsp_core.runtime.executor import AttentionExecutor
from dbsp_core.runtime.plan_maker import ConfiguredPlanMaker, PlanSettings
from dbsp_core.runtime.plan_reuse.plan_cache import PlanCache
from dbsp_core.sources import LocalQK

__all__ = ["FEW_STEPS", "AttentionKey", "SizeContext"]

MOST_PASSES = 4
"""Passes of one denoising step that are distinguished for each layer: guidance has two or three."""

FEW_STEPS = 8
"""Denoisings of at most as many steps keep a plan for each: the next video's masks at that step are then closer
than the last step's."""


class AttentionKey(NamedTuple):
    """What a plan is kept for: a layer's attention in one of a step's passes, over one size of video.

    step: of a denoising of few steps, so that a plan is kept for the same step of the next video; None: for any step
    """

    size: Hashable
    layer: int
    cfg_branch: int
    step: int | None = None

    @property
    def one_before(self) -> AttentionKey | None:
        """The same attention a step earlier, where steps are distinguished."""
        return self._replace(step=self.step - 1) if self.step else None


@dataclass
class SizeContext:
    """Plans and executors of one size of video.

    Plans are kept by attention where masks change, and by mask where they don't; executors by mask where it has a name
    (its cache key), else by attention. Both are bounded: an attention has one executor, and a layer at most
    `MOST_PASSES` attentions, times `FEW_STEPS` where steps are distinguished.
    layers: of the model
    size:   names it
    settings: what plans are made by;  plans: keeps them
    """

    layers: int
    size: Hashable
    settings: PlanSettings
    plans: PlanCache
    plan_keys: dict[int, Hashable] = field(default_factory=dict)
    """By layer, what the plan of its last attention is kept for."""
    inputs_agreed: bool = False
    """Whether all ranks have compared the shapes of q, k and v."""
    _executors: dict[Hashable, AttentionExecutor] = field(default_factory=dict)
    _used: OrderedDict[AttentionKey, Hashable] = field(default_factory=OrderedDict)
    """By attention, the one used last at the end: what its executor is kept for."""

    @property
    def layout(self) -> SequenceLayout:
        return self.settings.layout

    @property
    def records(self) -> dict[int, Plan]:
        """By layer, its plan with the numbers of the mask that it was last used for. Waits for pending plans."""
        self.plans.flush()
        return {layer: self.plans.latest[key] for layer, key in sorted(self.plan_keys.items())}

    def for_each_call(
        self, attention: AttentionKey, new_mask: Callable[[Hashable], BlockMask], tokens: LocalQK
    ) -> tuple[Hashable, AttentionExecutor]:
        """The executor of an attention whose mask is computed from its queries and keys, and what it is kept by."""
        attention = self._judged_alike(attention, tokens.q, tokens.k)
        executor = self._make(attention, attention, None, new_mask(attention), tokens)
        self._keep(attention, attention, attention, executor)
        return attention, executor

    def for_mask_named(
        self,
        attention: AttentionKey,
        name: Hashable,
        changes: bool,
        new_mask: Callable[[Hashable], BlockMask],
        tokens: LocalQK,
    ) -> tuple[Hashable, AttentionExecutor]:
        """The executor of an attention whose mask has a name: made before, for this layer or another, or now.

        returns: it, after what it is kept by
        changes: whether the attention will have other masks: then its plan is kept from one to the next
        """
        attention = self._judged_alike(attention, tokens.q, tokens.k)
        key = attention.size, name, tokens.q.device
        plan_key: Hashable = attention if changes else key
        executor = self._executors.get(key)
        if executor is None or not self.plans.count_reuse(plan_key, executor.plan, name):
            executor = self._make(attention, plan_key, name, new_mask(key), tokens)
        self._keep(attention, key, plan_key, executor)
        return key, executor

    def made_before(
        self, attention: AttentionKey, name: Hashable | None, q: torch.Tensor, k: torch.Tensor
    ) -> AttentionExecutor | None:
        """The executor that was made for a mask of this name. None: none was, or the mask has no name."""
        size = self._judged_alike(attention, q, k).size
        return None if name is None else self._executors.get((size, name, q.device))

    def _judged_alike(self, attention: AttentionKey, q: torch.Tensor, k: torch.Tensor) -> AttentionKey:
        """The same; under a memory limit one for each batch size, with gradients or without: their plans differ."""
        if self.settings.memory is None:
            return attention
        return attention._replace(size=(attention.size, len(q), _keeps_gradients(q, k)))

    def _keep(self, attention: AttentionKey, key: Hashable, plan_key: Hashable, executor: AttentionExecutor) -> None:
        """Remembers an attention's executor, and drops those that no attention has any more."""
        self._executors[key] = executor
        self.plan_keys[attention.layer] = plan_key
        outdated = {self._used.get(attention, key)}
        self._used[attention] = key
        self._used.move_to_end(attention)
        while len(self._used) > self.layers * MOST_PASSES * (1 if attention.step is None else FEW_STEPS):
            oldest, its_key = self._used.popitem(last=False)
            self.plans.forget(oldest)
            outdated.add(its_key)
        for one in outdated.difference(self._used.values()):
            self._executors.pop(one, None)

    def _make(
        self, attention: AttentionKey, plan_key: Hashable, name: Hashable | None, mask: BlockMask, tokens: LocalQK
    ) -> AttentionExecutor:
        shape = AttentionShape.of(tokens.q, mask.heads, mask.grid.tokens)
        maker = ConfiguredPlanMaker(self.settings, shape, _keeps_gradients(tokens.q, tokens.k))
        if plan_key == attention and attention.one_before is not None:
            self.plans.begin_with(attention, attention.one_before)
        planned = self.plans.plan_for(plan_key, mask, maker, name)
        plan, device, config = planned.plan, tokens.q.device, self.settings.config
        used = self._used.get(attention) or (attention.one_before and self._used.get(attention.one_before))
        before = self._executors.get(used)
        if before is not None and before.device == device and plan.assignment.equals(before.part.assignment):
            return before.for_mask(plan, mask, mark=config.debug)
        part = (planned.part or maker.rank_plan(plan.assignment)).to(device)
        return AttentionExecutor.of_part(part, plan, mask, self.settings.group, config.kernel, mark=config.debug)


def _keeps_gradients(q: torch.Tensor, k: torch.Tensor) -> bool:
    return q.requires_grad or k.requires_grad
