"""When a plan has expired (paper §4.2.1, threshold P_s), and how often plans were kept."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace

from dbsp_core.planning.assignment import Assignment
from dbsp_core.planning.plan import Plan

__all__ = ["KeptPlan", "ReplanRule", "ReuseCounters"]


@dataclass(frozen=True)
class KeptPlan:
    """The plan of one attention.

    Attributes:
        plan: The plan, with its numbers for the mask that it was last used for.
        made_for: The name of the mask that a plan was last made for, None where it has none.
        made: What was made for that mask.
    """

    plan: Plan
    made_for: Hashable | None = None
    made: Assignment | None = None

    @classmethod
    def new(cls, plan: Plan, name: Hashable | None) -> KeptPlan:
        """A plan that was just made for the mask of this name."""
        return cls(plan, name, plan.assignment)

    def used_with(self, plan: Plan) -> KeptPlan:
        """Returns what is kept after one more call, for whose mask `plan` has its numbers."""
        return replace(self, plan=plan)

    def was_made_for(self, name: Hashable | None) -> bool:
        """Whether the plan was made for the mask of this name; False where it has none."""
        if name is None or name != self.made_for or self.made is None:
            return False
        return self.made.equals(self.plan.assignment)


@dataclass(frozen=True)
class ReplanRule:
    """When a plan has expired.

    Attributes:
        threshold: P_s of the paper: a plan is kept while ρ_s of the current mask under it stays at or below this.
    """

    threshold: float = 1.10

    def expired(self, used: KeptPlan, name: Hashable | None = None) -> bool:
        """Whether the call that was counted last is the plan's last.

        A plan that was made for the mask of that call, which has this name, does not expire: another one made for it
        would be the same.
        """
        return used.plan.rho > self.threshold and not used.was_made_for(name)


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
