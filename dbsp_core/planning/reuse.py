"""Plan reuse (paper, §4.2.1): an attention keeps its plan while it is balanced enough for the next mask.

Plans lag predicted masks by one call. The row counts of a predicted mask are copied to the host while the call
computes, and read at the attention's next call. The counts of the next mask are predicted as these counts plus their
usual change between the two steps (`UsualCounts`). The plan is kept while its ρ_s on the predicted counts is at most
P_s, else a new plan is made from them. All ranks have equal counts and read them at the same call, so all decide the
same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from dbsp_core.masks.mask_counts import RowCounts
from dbsp_core.masks.steps import DenoisingStep
from dbsp_core.planning.plan import Plan
from dbsp_core.utils.errors import in_number

MakePlan = Callable[[np.ndarray, "Plan | None"], Plan]
"""Makes a plan for row counts int64[H, nq]; takes the plan in use, or None."""
MOST_BYTES = 8 << 20
"""Host memory limit of one attention's `UsualCounts`: 88 steps of Wan2.1-14B at 720p, 95 kB each."""
MOST_GENERATIONS = 8
"""Generations in a plain mean; each further generation replaces an eighth of it."""


@dataclass(eq=False)
class PlanUse:
    """One call of an attention and its plan."""

    plan: Plan  # Its statistics are those of the mask that it was made or counted for last
    new: bool  # True if the plan was made for this call
    counted: Plan | None = None  # The plan with statistics of this call's mask; None until known
    counts: RowCounts | None = None  # Of a predicted mask; the copy from the device may be in flight
    moment: DenoisingStep = field(default_factory=DenoisingStep)  # Step and generation


@dataclass(eq=False)
class UsualCounts:
    """An attention's mean row counts per step, over the generations so far.

    Counts differ between prompts as much as between steps, but the change from one step to the next is similar for all
    prompts. For a generation's first call, the mean counts of its step are the prediction.
    """

    by_step: dict[int, tuple[int, np.ndarray]] = field(default_factory=dict)
    """By step: number of generations (at most `MOST_GENERATIONS`) and mean float32[H, nq]."""

    def expected(self, rows: np.ndarray, last: DenoisingStep, now: DenoisingStep) -> np.ndarray:
        """Predicts a call's row counts int64[H, nq].

        Args:
            rows: int64[H, nq], counts of the attention's last call, at step `last`, before they are added.
        """
        _, here = self.by_step.get(now.step, (0, None))
        _, before = self.by_step.get(last.step, (0, None))
        if here is None or here.shape != rows.shape:
            return rows
        if now.generation != last.generation:
            return np.rint(here).astype(np.int64)
        if before is None or before.shape != rows.shape:
            return rows
        return np.rint(rows + (here - before)).clip(0).astype(np.int64)

    def add(self, rows: np.ndarray, step: int) -> None:
        """Adds a call's counts int64[H, nq] at a step; beyond `MOST_BYTES`, new steps are ignored."""
        generations, mean = self.by_step.get(step, (0, None))
        added = rows.astype(np.float32)
        if mean is None and len(self.by_step) * added.nbytes >= MOST_BYTES:
            return
        if mean is None or mean.shape != rows.shape:
            self.by_step[step] = 1, added
            return
        generations = min(generations + 1, MOST_GENERATIONS)
        self.by_step[step] = generations, mean + (added - mean) / np.float32(generations)


@dataclass
class ReuseStatistics:
    """Sums over the calls of a session."""

    calls: int = 0  # Attentions computed
    plans: int = 0  # Plans made for them
    counted: int = 0  # Calls with known ρ_s
    rho_sum: float = 0.0  # Sum of ρ_s over these calls; `worst_rho`: maximum
    worst_rho: float = 1.0
    dense: int = 0  # Of these calls, those whose masks skip no blocks
    waits: int = 0  # Calls that waited for the counts of their predicted mask
    wait_s: float = 0.0  # Seconds of these waits
    plan_s: float = 0.0  # Seconds of planning by these counts, including agreement between ranks
    replaced: Counter[int] = field(default_factory=Counter)  # By layer, calls that ran dense: masks were too dense

    @property
    def mean_rho(self) -> float:
        """Mean ρ_s; 1.0 before any is known."""
        return self.rho_sum / self.counted if self.counted else 1.0

    def __str__(self) -> str:
        rho = f", ρ_s {self.mean_rho:.3f}" if self.counted else ""
        return "; ".join([f"{in_number(self.calls, 'call')}, {in_number(self.plans, 'plan')}{rho}", *self.notes()])

    def notes(self) -> list[str]:
        """Returns notes on the cost of `plan: current` and on layers that ran dense."""
        notes = []
        if 2 * self.waits > self.calls:  # more than each attention's first call
            wait_ms, plan_ms = (1e3 * seconds / self.calls for seconds in (self.wait_s, self.plan_s))
            waits = f"{self.waits / self.calls:.2f} host waits per call"
            notes.append(f"plan current: {waits} of {wait_ms:.2f} ms, and planning of {plan_ms:.2f} ms")
        if self.replaced:
            layers = ", ".join(map(str, sorted(self.replaced)))
            share = f"{self.replaced.total()} of {in_number(self.calls, 'call')}"
            notes.append(f"dense attention replaced masks too dense to be faster in {share} (layers {layers})")
        return notes


def next_use(counted: Plan, rows: np.ndarray, threshold: float, make: MakePlan) -> PlanUse:
    """Returns the next call of an attention, with the current plan if its ρ_s is at most `threshold`, else a new one.

    `counted` is the current plan with the statistics of `rows`, int64[H, nq] of the call's mask, known or predicted.
    """
    if counted.rho <= threshold:
        return PlanUse(counted, False)
    return PlanUse(make(rows, counted), True)


def replay(
    counts: Sequence[np.ndarray], threshold: float, make: MakePlan, *, steps: int | None = None, lag: bool = True
) -> list[PlanUse]:
    """Simulates a session's successive calls of one attention; `use.counted.rho` is ρ_s of each call.

    Args:
        counts: int64[H, nq] per call, active blocks of each row.
        threshold: P_s.
        steps: Calls per generation; None: one generation.
        lag: True if plans lag by one call (predicted masks). False if each call uses its own counts, as in the paper
            and for static masks.
    """
    uses: list[PlanUse] = []
    usual, last = UsualCounts(), DenoisingStep()
    for call, rows in enumerate(counts):
        before = uses[-1].counted if uses else None
        now = DenoisingStep(step=call % (steps or len(counts)), generation=call // (steps or len(counts)))
        if before is None or before.owner.shape != rows.shape:
            use = PlanUse(make(rows, None), True)
        else:
            judged = usual.expected(counts[call - 1], last, now) if lag else rows
            use = next_use(before.counted(judged, compare=False), judged, threshold, make)
            usual.add(counts[call - 1], last.step)
        use.counted = use.plan.counted(rows, compare=False)
        last = now
        uses.append(use)
    return uses
