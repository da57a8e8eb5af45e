"""When an attention's plan is kept (paper, §4.2.1): while it is balanced enough under its next mask.

Plans lag predicted masks by one call. The row counts of a predicted mask are copied to the host while the call
computes, and are read at the attention's next call. Then ρ_s in use is known, and the plan is kept while ρ_s ≤ P_s,
else a new one is made from these counts. All ranks have equal counts and read them at the same call, so all decide the
same, whenever the copies arrive.

Masks change a lot between the last and the first step, so a new generation starts with the plan of the previous
generation's first step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from dbsp_core.planning.plan import Plan

MakePlan = Callable[[np.ndarray, "Plan | None"], Plan]
"""Returns a new plan for row counts int64[H, nq], given the plan in use, or None if there is none."""


@dataclass(eq=False)
class PlanUse:
    """One call of an attention, with the plan that it uses."""

    plan: Plan  # The plan. Its numbers are those of the mask that it was made for or counted for last.
    new: bool  # True if the plan was made for this call
    counted: Plan | None = None  # The plan with the numbers of the call's own mask, or None until they are known


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
    """Returns what a session does in successive calls of one attention: `use.counted.rho` is ρ_s in use.

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
