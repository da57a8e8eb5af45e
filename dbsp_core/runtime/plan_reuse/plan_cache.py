"""One plan per attention, kept while it is even enough."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from typing import Protocol

from dbsp_core.masks.block_mask import BlockMask
from dbsp_core.planning.assignment import Assignment
from dbsp_core.planning.plan import Plan
from dbsp_core.runtime.plan_reuse.rule import PlanUsage, ReplanRule, ReuseCounters
from dbsp_core.runtime.rank_plan import RankPlan

__all__ = ["PlanCache", "PlanMaker", "Planned", "PlansBy"]


class PlanMaker(Protocol):
    """Makes plans for the calls of one attention."""

    def make(self, mask: BlockMask, current: Plan | None) -> Plan:
        """The plan for a mask. current: the one in use"""
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


@dataclass
class PlanCache:
    """One plan per attention, kept as long as `rule` says.

    An attention is a layer's, and a guidance pass's where passes have masks of their own. Whether to keep a plan
    follows from the masks' bits and the kept plan only, which all ranks share: no rank can decide otherwise than the
    others. Every call waits for its mask to be counted.
    compare: whether plans tell what the contiguous plan would do; see `dbsp_core.planning.plan.make_plan`
    """

    rule: ReplanRule
    counters: ReuseCounters = field(default_factory=ReuseCounters)
    compare: bool = True
    latest: dict[Hashable, Plan] = field(default_factory=dict)
    """By attention, its plan with the numbers of the mask it was last used for."""
    _usages: dict[Hashable, PlanUsage] = field(default_factory=dict)

    def plan_for(self, key: Hashable, mask: BlockMask, maker: PlanMaker, name: Hashable | None = None) -> Planned:
        """The kept plan if it still serves, else a new one; with this mask's numbers.

        name: the mask's, which no other mask of the attention has; None: it has none
        """
        self.counters.calls += 1
        plan = self.latest.get(key)
        used = plan.evaluate(mask, compare=self.compare) if plan is not None and plan.fits(mask) else None
        chosen = self._renewed(key, used, mask, maker, plan, name)
        self.counters.replans += chosen is not used
        self.counters.add(chosen)
        self.latest[key] = chosen
        return Planned(chosen)

    def count_reuse(self, key: Hashable, plan: Plan, name: Hashable | None = None) -> bool:
        """Counts one more call of an attention with a mask that `plan` has the numbers of.

        returns: False, and counts nothing, where the plan has expired: a new one is to be made for the mask
        name: the mask's, as for `plan_for`
        """
        usage = self._usages.setdefault(key, PlanUsage(best_rho=plan.rho))
        if usage.expired_by(plan, self.rule, name):
            return False
        usage.add(plan)
        self.counters.calls += 1
        self.counters.add(plan)
        self.latest[key] = plan
        return True

    def begin_with(self, key: Hashable, other: Hashable) -> None:
        """Lets an attention that has no plan begin with another's, if that has one."""
        if key not in self.latest and other in self.latest:
            self.latest[key] = self.latest[other]
            self._usages[key] = replace(self._usages[other], excess=0.0)

    def forget(self, key: Hashable) -> None:
        """Drops what is kept for an attention."""
        for kept in (self.latest, self._usages):
            kept.pop(key, None)

    def start(self) -> None:
        """Lets begin what may run beside the calls' own work: nothing here."""

    def flush(self) -> None:
        """Waits for what is pending, so that counters and `latest` cover every call: nothing here."""

    def _renewed(
        self,
        key: Hashable,
        used: Plan | None,
        mask: BlockMask,
        maker: PlanMaker,
        current: Plan | None,
        name: Hashable | None,
    ) -> Plan:
        """The plan to use from now on: `used`, which has this mask's numbers, or a new one if it expired."""
        if used is not None:
            usage = self._usages.setdefault(key, PlanUsage())
            expired = usage.expired_by(used, self.rule, name)
            usage.add(used)
            if not expired:
                return used
        made = maker.make(mask, current)
        self._usages[key] = PlanUsage.of(made, name)
        return made
