"""One plan per attention, kept while it is even enough (paper §4.2.1)."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from dbsp_core.masks.block_mask import BlockMask
from dbsp_core.planning.assignment import Assignment
from dbsp_core.planning.plan import Plan
from dbsp_core.runtime.rank_plan import RankPlan
from dbsp_core.runtime.session.replan_rule import KeptPlan, ReplanRule, ReuseCounters

__all__ = ["PlanCache", "PlanMaker", "Planned", "PlansBy", "SyncPlanCache"]


class PlanMaker(Protocol):
    """Makes plans for the calls of one attention."""

    def make(self, mask: BlockMask, current: Plan | None) -> Plan:
        """The plan for a mask, where `current` is in use."""
        ...

    def rank_plan(self, assignment: Assignment) -> RankPlan | None:
        """This rank's part in an assignment, on the host; None: whoever gets the plan makes it."""
        ...


@dataclass(frozen=True)
class PlansBy:
    """A `PlanMaker` of one function, for use offline."""

    plan: Callable[[BlockMask], Plan]

    def make(self, mask: BlockMask, current: Plan | None) -> Plan:
        return self.plan(mask)

    def rank_plan(self, assignment: Assignment) -> RankPlan | None:
        return None


@dataclass(frozen=True)
class Planned:
    """A plan to use, and this rank's part in it where that was prepared beforehand: they belong together."""

    plan: Plan
    part: RankPlan | None = None


class PlanCache(Protocol):
    """One plan per attention, kept as long as a `ReplanRule` says.

    An attention is a layer's, and a guidance pass's where passes have masks of their own. Whether to keep a plan
    follows from the masks' bits and the kept plan only, which all ranks share: no rank can decide otherwise than the
    others.
    """

    counters: ReuseCounters

    @property
    def latest(self) -> Mapping[Hashable, Plan]:
        """Each attention's plan, with the numbers of the mask that it was last used for."""
        ...

    def plan_for(self, key: Hashable, mask: BlockMask, maker: PlanMaker, name: Hashable | None = None) -> Planned:
        """The plan to use for one call of an attention.

        Args:
            key: Names the attention.
            mask: Of this call.
            maker: Makes a new plan where one is due.
            name: The mask's, which no other mask of the attention has; None where it has none.
        """
        ...

    def count_reuse(self, key: Hashable, plan: Plan, name: Hashable | None = None) -> bool:
        """Counts one more call of an attention with a mask that `plan` has the numbers of.

        Returns:
            False, having counted nothing, where the plan has expired: `plan_for` is to be asked then.
        """
        ...

    def forget(self, key: Hashable) -> None:
        """Drops what is kept for an attention."""
        ...

    def start(self) -> None:
        """Begins what may run while the calls' own work does: to be called once that is queued on the device."""
        ...

    def flush(self) -> None:
        """Waits for what is pending, so that `counters` and `latest` cover every call."""
        ...


@dataclass
class SyncPlanCache:
    """A `PlanCache` in which every call waits for its own mask to be counted, and plans come with its numbers.

    Attributes:
        compare: See `make_plan`.
    """

    rule: ReplanRule
    counters: ReuseCounters = field(default_factory=ReuseCounters)
    compare: bool = True
    latest: dict[Hashable, Plan] = field(default_factory=dict)
    _kept: dict[Hashable, KeptPlan] = field(default_factory=dict)

    def plan_for(self, key: Hashable, mask: BlockMask, maker: PlanMaker, name: Hashable | None = None) -> Planned:
        """The kept plan if it still serves, else a new one; with this mask's numbers."""
        self.counters.calls += 1
        kept = self._kept.get(key)
        if kept is None or not kept.plan.fits(mask):
            chosen, new = new_plan(kept, mask, maker, name), True
        else:
            _, chosen, new = evaluate(kept, mask, maker, name, self.rule, self.compare)
        self.counters.replans += new
        self._keep(key, chosen)
        return Planned(chosen.plan)

    def count_reuse(self, key: Hashable, plan: Plan, name: Hashable | None = None) -> bool:
        kept = self._kept.get(key, KeptPlan(plan)).used_with(plan)
        if self.rule.expired(kept, name):
            return False
        self.counters.calls += 1
        self._keep(key, kept)
        return True

    def forget(self, key: Hashable) -> None:
        self._kept.pop(key, None)
        self.latest.pop(key, None)

    def start(self) -> None:
        """Nothing is pending here."""

    def flush(self) -> None:
        """Nothing is pending here."""

    def _keep(self, key: Hashable, used: KeptPlan) -> None:
        self.counters.add(used.plan)
        self._kept[key], self.latest[key] = used, used.plan


def new_plan(kept: KeptPlan | None, mask: BlockMask, maker: PlanMaker, name: Hashable | None) -> KeptPlan:
    """A plan made for the mask of this name, where `kept` was in use."""
    return KeptPlan.new(maker.make(mask, None if kept is None else kept.plan), name)


def evaluate(
    kept: KeptPlan, mask: BlockMask, maker: PlanMaker, name: Hashable | None, rule: ReplanRule, compare: bool
) -> tuple[KeptPlan, KeptPlan, bool]:
    """The kept plan with this mask's numbers; the one to use from now on; and whether that is a new one.

    It is where the kept one expired; else it is the same.
    """
    used = kept.used_with(kept.plan.evaluate(mask, compare=compare))
    if rule.expired(used, name):
        return used, new_plan(kept, mask, maker, name), True
    return used, used, False
