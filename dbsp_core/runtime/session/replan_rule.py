"""When a plan has expired (paper §4.2.1, threshold P_s), and how often plans were kept."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace

from dbsp_core.planning.assignment import Assignment
from dbsp_core.planning.plan import Plan

__all__ = ["KeptPlan", "ReplanRule", "ReuseCounters"]


@dataclass(frozen=True)
class KeptPlan:
    """The plan of one attention, and what it has wasted since it was made.

    Attributes:
        plan: It, with the numbers of the mask that it was last used for.
        best_rho: ρ_s of the best plan that was known when it was made.
        excess: Σ over its calls of ρ_s less `best_rho`: what it has wasted, in times of a balanced attention.
        made_for: The name of the mask that a plan was last made for, None where it has none.
        made: What was made for that mask.
    """

    plan: Plan
    best_rho: float
    excess: float = 0.0
    made_for: Hashable | None = None
    made: Assignment | None = None

    @classmethod
    def new(cls, plan: Plan, name: Hashable | None) -> KeptPlan:
        """A plan that was just made for the mask of this name."""
        return cls(plan, plan.rho, made_for=name, made=plan.assignment)

    def used_with(self, plan: Plan) -> KeptPlan:
        """What is kept after one more call, whose mask `plan` has the numbers of."""
        return replace(self, plan=plan, excess=self.excess + max(0.0, plan.rho - self.best_rho))

    def unspent(self) -> KeptPlan:
        """The same plan for an attention that begins with it."""
        return replace(self, excess=0.0)

    def was_made_for(self, name: Hashable | None) -> bool:
        """Whether the plan was made for the mask of this name; False where it has none."""
        if name is None or name != self.made_for or self.made is None:
            return False
        return self.made.equals(self.plan.assignment)


@dataclass(frozen=True)
class ReplanRule:
    """When a plan has expired.

    Attributes:
        threshold: P_s of the paper: it is kept while ρ_s of the current mask under it stays at or below this, and
        budget: while its `KeptPlan.excess` stays at or below this. None: only the threshold counts.
    """

    threshold: float = 1.10
    budget: float | None = None

    def expired(self, used: KeptPlan, name: Hashable | None = None) -> bool:
        """Whether the call that was counted last is the plan's last.

        A plan that was made for the mask of that call, which has this name, does not expire: another one made for it
        would be the same.
        """
        uneven = used.plan.rho > self.threshold or (self.budget is not None and used.excess > self.budget)
        return uneven and not used.was_made_for(name)


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
