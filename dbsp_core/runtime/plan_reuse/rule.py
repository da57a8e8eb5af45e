"""When a plan has expired (paper §4.2.1, threshold P_s), and how often plans were kept."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from dbsp_core.planning.assignment import Assignment
from dbsp_core.planning.plan import Plan

__all__ = ["PlanUsage", "ReplanRule", "ReuseCounters"]


@dataclass(frozen=True)
class ReplanRule:
    """When a plan has expired.

    threshold: P_s of the paper: it is kept while ρ_s of the current mask under it stays at or below this
    budget:    and while its excess, Σ over its calls of ρ_s less the least that was known to be possible when it was
               made, stays at or below this; in times of a balanced attention. None: only the threshold counts
    """

    threshold: float = 1.10
    budget: float | None = None


@dataclass
class PlanUsage:
    """What one attention's plan has done so far.

    best_rho: ρ_s of the best plan known when it was made;  excess: what it has wasted, see `ReplanRule`
    made_for: the name of the mask that it was made for, None without one;  made: what was made for it
    """

    best_rho: float = 1.0
    excess: float = 0.0
    made_for: Hashable | None = None
    made: Assignment | None = None

    @classmethod
    def of(cls, made: Plan, name: Hashable | None) -> PlanUsage:
        """Of a plan that was just made for the mask of this name."""
        return cls(best_rho=made.rho, made_for=name, made=made.assignment)

    def expired_by(self, used: Plan, rule: ReplanRule, name: Hashable | None = None) -> bool:
        """Whether one more call, which `used` serves, is its last; the call is not counted.

        name: of the call's mask, None without one. A plan that was made for it does not expire: another one made for
        it would be the same.
        """
        excess = self._excess_with(used)
        expired = used.rho > rule.threshold or (rule.budget is not None and excess > rule.budget)
        return expired and not self._was_made_for(name, used)

    def _was_made_for(self, name: Hashable | None, used: Plan) -> bool:
        return (
            name is not None and name == self.made_for and self.made is not None and self.made.equals(used.assignment)
        )

    def add(self, used: Plan) -> None:
        """Counts a call that `used` served, or would serve."""
        self.excess = self._excess_with(used)

    def _excess_with(self, used: Plan) -> float:
        return self.excess + max(0.0, used.rho - self.best_rho)


@dataclass
class ReuseCounters:
    """What became of plans.

    calls:     attentions asked for
    replans:   plans made
    evaluated: masks whose ρ_s under the plan in use is known
    rho_used:  its sum over those, and `worst_used` its maximum
    rho_bound: sum over the same of the ρ_s that no plan can beat
    dense:     how many of them leave nothing out
    """

    calls: int = 0
    replans: int = 0
    evaluated: int = 0
    rho_used: float = 0.0
    worst_used: float = 1.0
    rho_bound: float = 0.0
    dense: int = 0

    def add(self, plan: Plan) -> None:
        """Counts a plan with the numbers of the mask it was used for."""
        self.evaluated += 1
        self.rho_used += plan.rho
        self.worst_used = max(self.worst_used, plan.rho)
        self.rho_bound += plan.rho_bound
        self.dense += plan.density == 1
