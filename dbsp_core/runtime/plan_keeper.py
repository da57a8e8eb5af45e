"""The plan of each attention, kept while it is balanced enough (paper, §4.2.1). Plans lag predicted masks by one call.

The row counts of a predicted mask are copied to the host while the call computes, and are read at the attention's next
call. Then ρ_s in use is known, and the plan is kept while ρ_s ≤ P_s, else a new one is made from these counts. All
ranks have equal counts and read them at the same call, so all decide the same, whenever the copies arrive.

Masks change a lot between the last and the first step, so a new generation starts with the plan of the previous
generation's first step.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np

from dbsp_core.masks.block_mask import BlockMask
from dbsp_core.masks.mask_counts import RowCounts
from dbsp_core.planning.plan import Plan
from dbsp_core.utils.errors import in_number

MakePlan = Callable[[np.ndarray, "Plan | None"], Plan]
"""Returns a new plan for row counts int64[H, nq], given the plan in use, or None if there is none."""


@dataclass
class ReuseStatistics:
    """Sums over the calls of a session."""

    calls: int = 0  # Attentions computed
    plans: int = 0  # Plans made
    counted: int = 0  # Calls whose ρ_s in use is known
    rho_sum: float = 0.0  # Sum of ρ_s in use over these calls; `worst_rho`, its maximum
    worst_rho: float = 1.0
    dense: int = 0  # Number of these calls whose masks leave nothing out

    @property
    def mean_rho(self) -> float:
        """Mean ρ_s in use; 1.0 before any is known."""
        return self.rho_sum / self.counted if self.counted else 1.0

    def __str__(self) -> str:
        rho = f", ρ_s {self.mean_rho:.3f}" if self.counted else ""
        return f"{in_number(self.calls, 'call')}, {in_number(self.plans, 'plan')}{rho}"

    def add(self, plan: Plan, calls: int = 1) -> None:
        """Adds calls whose plan has the numbers of the calls' own mask."""
        self.counted += calls
        self.rho_sum += calls * plan.rho
        self.worst_rho = max(self.worst_rho, plan.rho)
        self.dense += calls * (plan.density == 1)


@dataclass(eq=False)
class PlanUse:
    """One call of an attention, with the plan that it uses."""

    plan: Plan  # The plan. Its numbers are those of the mask that it was made for or counted for last.
    new: bool  # True if the plan was made for this call
    counted: Plan | None = None  # The plan with the numbers of the call's own mask, or None until they are known


@dataclass(frozen=True, eq=False)
class _LastCall:
    """The last call of an attention.

    Attributes:
        use: The plan that it used.
        counts: Row counts of its mask if that was predicted.
        generation: The number of its generation.
        first: The plan with which the next generation begins, or None if this call began a generation: then its own
            counts decide.
    """

    use: PlanUse
    counts: RowCounts | None = None
    generation: int = 0
    first: Plan | None = None


def kept_or_new(counted: Plan, rows: np.ndarray, threshold: float, make: MakePlan) -> Plan:
    """Returns the plan for the next call: `counted` itself while its ρ_s is at most P_s, else a new one.

    Args:
        counted: The plan in use, with the numbers of `rows`.
        rows: int64[H, nq], active blocks of each row.
        threshold: P_s, the largest ρ_s up to which a plan is kept.
    """
    return counted if counted.rho <= threshold else make(rows, counted)


def known_use(last: Plan, rows: np.ndarray, threshold: float, make: MakePlan, *, compare: bool = False) -> PlanUse:
    """Returns an attention's next call where its own row counts are known before it: the last plan's, or a new one."""
    before = last.counted(rows, compare=compare)
    plan = kept_or_new(before, rows, threshold, make)
    return PlanUse(plan, plan is not before, plan)


def next_use(
    counted: Plan, rows: np.ndarray, first: Plan | None, begins: bool, threshold: float, make: MakePlan
) -> tuple[PlanUse, Plan | None]:
    """Returns an attention's next call, and the plan with which the generation after that call's begins.

    Args:
        counted: The plan of the last call, with the numbers of `rows`.
        rows: int64[H, nq], active blocks of each row in the last call.
        first: The plan with which the next generation begins, or None if the last call began a generation.
        begins: True if the next call begins a generation; then its own counts decide, and the plan returned is None.
        threshold: P_s.
    """
    if begins and first is not None:
        return PlanUse(first, False), None
    plan = kept_or_new(counted, rows, threshold, make)
    following = plan if first is None else first
    return PlanUse(plan, plan is not counted), None if begins else following


def replay(
    counts: Sequence[np.ndarray], threshold: float, make: MakePlan, *, steps: int | None = None, lag: bool = True
) -> list[PlanUse]:
    """Returns what `PlanKeeper` does in successive calls of one attention: `use.counted.rho` is ρ_s in use.

    Args:
        counts: int64[H, nq] by call, active blocks of each row.
        threshold: P_s.
        steps: Calls of a generation; None: all are of one.
        lag: True if plans lag by one call, as for predicted masks. Otherwise each call waits for its own counts, as in
            the paper and for masks that are known beforehand.
    """
    uses: list[PlanUse] = []
    first: Plan | None = None
    for call, rows in enumerate(counts):
        before = (uses[-1].counted or uses[-1].plan) if uses else None
        if before is None or before.owner.shape != rows.shape:
            use, first = PlanUse(make(rows, None), True), None
        elif lag:
            begins = steps is not None and call % steps == 0
            use, first = next_use(before, counts[call - 1], first, begins, threshold, make)
        else:
            use = known_use(before, rows, threshold, make)
        use.counted = use.counted or use.plan.counted(rows, compare=False)
        uses.append(use)
    return uses


@dataclass(eq=False)
class PlanKeeper:
    """The plan in use of each attention of one video size, and the counts under way."""

    threshold: float  # P_s
    compare: bool  # True if plans are compared with the contiguous plan; see `make_plan`
    statistics: ReuseStatistics = field(default_factory=ReuseStatistics)  # Sums that all sizes of a session share
    calls: int = 0  # Number of calls with predicted masks, by which ranks notice that one of them has left a pass
    _last: dict[Hashable, _LastCall] = field(default_factory=dict)

    def plan_known(self, key: Hashable, mask: BlockMask, make: MakePlan) -> PlanUse:
        """Returns the plan for a mask that is known beforehand: the attention's own if it fits, else a new one.

        Waits for the mask's counts. Nothing is kept before `use`.
        """
        last = self._last.get(key)
        rows = mask.counts.rows
        if last is None or not last.use.plan.fits(mask):
            plan = make(rows, None if last is None else last.use.plan)
            return PlanUse(plan, True, plan)
        return known_use(last.use.plan, rows, self.threshold, make, compare=self.compare)

    def use(self, key: Hashable, use: PlanUse) -> None:
        """Counts one more call of an attention, with a plan that has the numbers of the call's own mask."""
        self._begin(key, _LastCall(use))
        self.statistics.add(use.plan)

    def plan_predicted(self, key: Hashable, mask: BlockMask, make: MakePlan, generation: int = 0) -> PlanUse:
        """Returns the plan for one more call of an attention, with a mask that was predicted for this call alone.

        Waits for the counts of the attention's last call. Only if there is none, or its plan does not fit the mask,
        the call plans at once and waits for its own counts.

        Args:
            generation: Number of the generation that the call is in.
        """
        last, use, first = self._last.get(key), None, None
        if last is not None:
            before = self._count(last)
            if last.counts is not None and before.fits(mask):
                begins = generation != last.generation
                use, first = next_use(before, last.counts.rows, last.first, begins, self.threshold, make)
        counts = mask.counts.copy_rows()
        if use is None:
            use = PlanUse(make(counts.rows, None if last is None else last.use.plan), True)
        self._begin(key, _LastCall(use, counts, generation, first))
        self.calls += 1
        return use

    def settle(self) -> None:
        """Reads the counts under way, so that `statistics` and `counted` cover every call."""
        for last in self._last.values():
            self._count(last)

    def last_used(self, key: Hashable) -> Plan:
        """Returns the plan of an attention's last call with the numbers of its mask. Waits for its counts."""
        return self._count(self._last[key])

    def forget(self, key: Hashable) -> None:
        """Drops the plan of an attention."""
        last = self._last.pop(key, None)
        if last is not None:
            self._count(last)

    def restart(self) -> None:
        """Drops the plans of predicted masks: each attention's next call plans at once."""
        self.settle()
        self._last = {key: last for key, last in self._last.items() if last.counts is None}
        self.calls = 0

    def _begin(self, key: Hashable, call: _LastCall) -> None:
        self._last[key] = call
        self.statistics.calls += 1
        self.statistics.plans += call.use.new

    def _count(self, last: _LastCall) -> Plan:
        """Returns the plan of a call with the numbers of its mask. Waits for its counts."""
        use = last.use
        if use.counted is None and last.counts is not None:
            use.counted = use.plan.counted(last.counts.rows, compare=self.compare)
            self.statistics.add(use.counted)
        return use.counted or use.plan
