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

from dbsp_core.masks.mask_counts import RowCounts
from dbsp_core.planning.plan import Plan

MakePlan = Callable[[np.ndarray, "Plan | None"], Plan]
"""Returns a new plan for row counts int64[H, nq], given the plan in use, or None if there is none."""


@dataclass(eq=False)
class PlanUse:
    """One call of an attention, with the plan that it uses."""

    plan: Plan  # The plan. Its numbers are those of the mask that it was made for or counted for last.
    new: bool  # True if the plan was made for this call
    counted: Plan | None = None  # The plan with the numbers of the call's own mask, or None until they are known
    counts: RowCounts | None = None  # Those of a mask that was predicted: a copy from the device, perhaps under way
    generation: int = 0  # Its number
    first: Plan | None = None  # The plan with which the next generation begins, or None if this call begins one


def known_use(last: Plan, rows: np.ndarray, threshold: float, make: MakePlan, *, compare: bool = False) -> PlanUse:
    """Returns an attention's next call where its own row counts are known before it: the last plan's, or a new one."""
    before = last.counted(rows, compare=compare)
    plan = before if before.rho <= threshold else make(rows, before)
    return PlanUse(plan, plan is not before, plan)


def next_use(last: PlanUse, rows: np.ndarray, generation: int, threshold: float, make: MakePlan) -> PlanUse:
    """Returns the call after an attention's last one, before its mask is predicted.

    Args:
        last: The last call, with its numbers.
        rows: int64[H, nq], active blocks of each row in the last call.
        generation: Number of the generation that the call is in.
        threshold: P_s.
    """
    begins = generation != last.generation
    if begins and last.first is not None:
        return PlanUse(last.first, False, generation=generation)
    before = last.counted or last.plan
    plan = before if before.rho <= threshold else make(rows, before)
    return PlanUse(plan, plan is not before, generation=generation, first=None if begins else last.first or plan)


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
    for call, rows in enumerate(counts):
        before = (uses[-1].counted or uses[-1].plan) if uses else None
        if before is None or before.owner.shape != rows.shape:
            use = PlanUse(make(rows, None), True, generation=call // steps if steps else 0)
        elif lag:
            use = next_use(uses[-1], counts[call - 1], call // steps if steps else 0, threshold, make)
        else:
            use = known_use(before, rows, threshold, make)
        use.counted = use.counted or use.plan.counted(rows, compare=False)
        uses.append(use)
    return uses
