"""When an attention's plan is kept (paper, §4.2.1): while it is balanced enough under its next mask.

Plans lag predicted masks by one call. The row counts of a predicted mask are copied to the host while the call
computes, and are read at the attention's next call. Then ρ_s in use is known, and the counts of the next mask are
expected to be these, changed as they usually change from that step to this one (`UsualCounts`). The plan is kept while
its ρ_s on the expected counts is at most P_s, else a new one is made from them. All ranks have equal counts and read
them at the same call, so all decide the same, whenever the copies arrive.
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
"""Returns a new plan for row counts int64[H, nq], given the plan in use, or None if there is none."""
MOST_BYTES = 8 << 20
"""Memory of one attention's `UsualCounts` on the host: 88 steps of Wan2.1-14B at 720p, whose steps have 95 kB each."""
MOST_GENERATIONS = 8
"""Generations that a mean counts in full; each further one replaces an eighth of it."""


@dataclass(eq=False)
class PlanUse:
    """One call of an attention, with the plan that it uses."""

    plan: Plan  # The plan. Its numbers are those of the mask that it was made for or counted for last.
    new: bool  # True if the plan was made for this call
    counted: Plan | None = None  # The plan with the numbers of the call's own mask, or None until they are known
    counts: RowCounts | None = None  # Those of a mask that was predicted: a copy from the device, perhaps under way
    moment: DenoisingStep = field(default_factory=DenoisingStep)  # Its step, and the number of its generation


@dataclass(eq=False)
class UsualCounts:
    """An attention's mean row counts at each step of a generation, over the generations so far.

    One step's counts differ between prompts as much as from step to step, but the change from one step to the next is
    much the same for all prompts. A generation's first call has none before it: its step's mean counts are expected.
    """

    by_step: dict[int, tuple[int, np.ndarray]] = field(default_factory=dict)
    """Number of generations, at most `MOST_GENERATIONS`, and their mean float32[H, nq], by step."""

    def expected(self, rows: np.ndarray, last: DenoisingStep, now: DenoisingStep) -> np.ndarray:
        """Returns the row counts int64[H, nq] that a call is expected to have.

        Args:
            rows: int64[H, nq], the counts of the attention's last call, at step `last`; they are not added yet.
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
        """Adds the counts int64[H, nq] of a call at a step; beyond `MOST_BYTES`, only those of known steps."""
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
    counted: int = 0  # Calls whose ρ_s in use is known
    rho_sum: float = 0.0  # Sum of ρ_s in use over these calls; `worst_rho`, its maximum
    worst_rho: float = 1.0
    dense: int = 0  # Number of these calls whose masks leave nothing out
    waits: int = 0  # Calls with a predicted mask whose own counts were waited for
    wait_s: float = 0.0  # Seconds of these waits
    plan_s: float = 0.0  # Seconds of planning by these counts, in which ranks agree
    replaced: Counter[int] = field(default_factory=Counter)  # Calls, by layer, whose predicted masks were too dense

    @property
    def mean_rho(self) -> float:
        """Mean ρ_s in use; 1.0 before any is known."""
        return self.rho_sum / self.counted if self.counted else 1.0

    def __str__(self) -> str:
        rho = f", ρ_s {self.mean_rho:.3f}" if self.counted else ""
        return "; ".join([f"{in_number(self.calls, 'call')}, {in_number(self.plans, 'plan')}{rho}", *self.notes()])

    def notes(self) -> list[str]:
        """Returns in words what plans by calls' own counts cost, and which layers ran dense, if there were any."""
        notes = []
        if 2 * self.waits > self.calls:  # not the first calls of attentions alone
            wait_ms, plan_ms = (1e3 * seconds / self.calls for seconds in (self.wait_s, self.plan_s))
            waits = f"{self.waits / self.calls:.2f} host waits a call"
            notes.append(f"plan current: {waits} of {wait_ms:.2f} ms, and planning of {plan_ms:.2f} ms")
        if self.replaced:
            layers = ", ".join(map(str, sorted(self.replaced)))
            share = f"{self.replaced.total()} of {in_number(self.calls, 'call')}"
            notes.append(f"dense attention replaced masks too dense to be faster in {share} (layers {layers})")
        return notes

    def waited(self, wait_s: float, plan_s: float) -> None:
        """Adds a host wait for a call's own counts, and the time of planning by them."""
        self.waits += 1
        self.wait_s += wait_s
        self.plan_s += plan_s


def next_use(counted: Plan, rows: np.ndarray, threshold: float, make: MakePlan) -> PlanUse:
    """Returns an attention's next call: with the plan in use while its ρ_s is at most P_s, else with a new one.

    Args:
        counted: The plan in use, with the numbers of `rows`.
        rows: int64[H, nq], active blocks of each row: those of the call's mask if they are known, else as expected.
        threshold: P_s, the largest ρ_s up to which a plan is kept.
    """
    if counted.rho <= threshold:
        return PlanUse(counted, False)
    return PlanUse(make(rows, counted), True)


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
