"""One plan per attention, kept while it is even enough (paper §4.2.1), and how often plans were kept."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace

from dbsp_core.masks.block_mask import BlockMask
from dbsp_core.planning.plan import Plan

__all__ = ["KeptPlan", "MakePlan", "PlanCache", "Planned", "ReuseCounters", "new_plan"]

MakePlan = Callable[[BlockMask, "Plan | None"], Plan]
"""Returns a new plan for a mask, given the plan in use, or None if there is none."""


@dataclass
class ReuseCounters:
    """What became of plans.

    Attributes:
        calls: Attentions asked for.
        replans: Plans made.
        evaluated: Masks whose ρ_s under the plan in use is known.
        rho_used: Sum of ρ_s over those masks; `worst_used`, its maximum.
        rho_bound: Sum over the same masks of the ρ_s that no plan can beat.
        dense: How many of the masks leave nothing out.
    """

    calls: int = 0
    replans: int = 0
    evaluated: int = 0
    rho_used: float = 0.0
    worst_used: float = 1.0
    rho_bound: float = 0.0
    dense: int = 0

    @property
    def mean_rho(self) -> float:
        """Mean ρ_s under the plans in use; 1.0 before any is known."""
        return self.rho_used / self.evaluated if self.evaluated else 1.0

    def add(self, plan: Plan) -> None:
        """Counts a plan with the numbers of the mask it was used for."""
        self.evaluated += 1
        self.rho_used += plan.rho
        self.worst_used = max(self.worst_used, plan.rho)
        self.rho_bound += plan.rho_bound
        self.dense += plan.density == 1


@dataclass(frozen=True)
class KeptPlan:
    """The plan of one attention.

    Attributes:
        plan: The plan, with its numbers for the mask that it was last used for.
        made_for: The name of the mask that a plan was last made for, or None if that mask has no name.
        made: The plan that was made for that mask.
    """

    plan: Plan
    made_for: Hashable | None = None
    made: Plan | None = None

    @classmethod
    def new(cls, plan: Plan, name: Hashable | None) -> KeptPlan:
        """A plan that was just made for the mask of this name."""
        return cls(plan, name, plan)

    def used_with(self, plan: Plan) -> KeptPlan:
        """Returns what is kept after one more call, for whose mask `plan` has its numbers."""
        return replace(self, plan=plan)

    def expired(self, threshold: float, name: Hashable | None = None) -> bool:
        """Returns True if the call that was counted last is the plan's last.

        A plan that was made for the mask of that call, which has this name, does not expire: another plan made for
        that mask would be the same.

        Args:
            threshold: P_s of the paper: the largest ρ_s up to which a plan is kept.
        """
        return self.plan.rho > threshold and not self._was_made_for(name)

    def _was_made_for(self, name: Hashable | None) -> bool:
        if name is None or name != self.made_for or self.made is None:
            return False
        return self.made.same_routes(self.plan)


@dataclass(frozen=True)
class Planned:
    """The plan that a call uses."""

    plan: Plan


@dataclass
class PlanCache:
    """One plan per attention. Every call waits for its own mask to be counted, and plans come with its numbers.

    An attention is a layer's, and a guidance pass's if passes have masks of their own. Whether to keep a plan follows
    from the masks' bits and the kept plan only, which all ranks share: all ranks decide the same.

    Attributes:
        threshold: P_s: a plan is kept while ρ_s of the current mask under it stays at or below this.
        compare: See `make_plan`.
        latest: Each attention's plan, with its numbers for the mask that it was last used for.
    """

    threshold: float = 1.10
    counters: ReuseCounters = field(default_factory=ReuseCounters)
    compare: bool = True
    latest: dict[Hashable, Plan] = field(default_factory=dict)
    _kept: dict[Hashable, KeptPlan] = field(default_factory=dict)
    """The plan that each attention's next call uses."""

    def plan_for(
        self,
        key: Hashable,
        mask: BlockMask,
        make: MakePlan,
        name: Hashable | None = None,
    ) -> Planned:
        """Returns the plan to use for one call of an attention: the kept plan if it still serves, else a new one.

        Args:
            key: Names the attention.
            mask: Mask of this call.
            make: Makes a new plan where one is due.
            name: The mask's name, which no other mask of the attention has; None if it has none.
        """
        self.counters.calls += 1
        kept = self._kept.get(key)
        if kept is None or not kept.plan.fits(mask):
            chosen, new = new_plan(kept, mask, make, name), True
        else:
            _, chosen, new = self._evaluate(kept, mask, make, name)
        self.counters.replans += new
        self._keep(key, chosen)
        return Planned(chosen.plan)

    def count_reuse(self, key: Hashable, plan: Plan, name: Hashable | None = None) -> bool:
        """Counts one more call of an attention with a mask that `plan` has the numbers of.

        Returns:
            False, having counted nothing, if the plan has expired: `plan_for` is to be asked then.
        """
        kept = self._kept.get(key, KeptPlan(plan)).used_with(plan)
        if kept.expired(self.threshold, name):
            return False
        self.counters.calls += 1
        self._keep(key, kept)
        return True

    def forget(self, key: Hashable) -> None:
        """Drops what is kept for an attention."""
        self._kept.pop(key, None)
        self.latest.pop(key, None)

    def start(self) -> None:
        """Begins what may run while the calls' own work does: to be called once that is queued on the device."""

    def flush(self) -> None:
        """Waits for what is pending, so that `counters` and `latest` cover every call."""

    def _keep(self, key: Hashable, used: KeptPlan) -> None:
        self.counters.add(used.plan)
        self._kept[key], self.latest[key] = used, used.plan

    def _evaluate(
        self, kept: KeptPlan, mask: BlockMask, make: MakePlan, name: Hashable | None
    ) -> tuple[KeptPlan, KeptPlan, bool]:
        """Returns the kept plan with this mask's numbers; the plan to use from now on; and whether that is new."""
        used = kept.used_with(kept.plan.counted(mask, compare=self.compare))
        if used.expired(self.threshold, name):
            return used, new_plan(kept, mask, make, name), True
        return used, used, False


def new_plan(kept: KeptPlan | None, mask: BlockMask, make: MakePlan, name: Hashable | None) -> KeptPlan:
    """A plan made for the mask of this name, where `kept` was in use."""
    return KeptPlan.new(make(mask, None if kept is None else kept.plan), name)
