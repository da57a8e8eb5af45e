"""Plans for where masks are going: a plan for a call that is yet to come serves for longer than one for this call.

What drifts over denoising steps is above all how dense each head is. Its trend over the last calls is carried on as
far as it has held so far; plans are made for several moments ahead, and the one that is predicted to serve longest
stands.
Integers, and float64 operations that IEEE fixes, alone: all ranks foresee the same.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from dbsp_core.layout.strategy import Strategy
from dbsp_core.masks.block_mask import BlockMask
from dbsp_core.masks.grid import BlockGrid
from dbsp_core.masks.mask_counts import MaskCounts
from dbsp_core.planning.imbalance import work_by_ring_step
from dbsp_core.planning.plan import Plan

__all__ = ["DensityTrend", "ForecastMask", "choose_longest_lived", "forecast_offsets"]

WINDOW = 4
"""Calls over which a head's change is measured: one call's is mostly noise."""
HORIZON = 25
"""Calls over which a plan is evaluated."""
UNIT = 1024
"""What 1 is where masks are scaled: counts stay whole numbers, and ρ_s knows no scale."""


@dataclass
class DensityTrend:
    """How many dense blocks each head of one attention had over the last calls."""

    _totals: deque[np.ndarray] = field(default_factory=lambda: deque(maxlen=2 * WINDOW + 1))

    def update(self, mask: BlockMask) -> None:
        """Adds a call's mask. Another number of heads clears it."""
        totals = mask.counts.rows.sum(axis=1)
        if self._totals and self._totals[-1].shape != totals.shape:
            self._totals.clear()
        self._totals.append(totals)

    def predict(self, calls: Sequence[int]) -> np.ndarray:
        """int64[len(calls), H]: each head's blocks so many calls after the last, in 1/UNIT of the last's.

        The change over the last window goes on in the share in which the change of the window before went on in it:
        all of it where masks move steadily, nothing where they jump back and forth or too few calls are known.
        """
        now = self._totals[-1]
        window = min(WINDOW, len(self._totals) - 1)
        if window == 0:
            return np.full((len(calls), len(now)), UNIT, dtype=np.int64)
        change = now - self._totals[-1 - window]
        kept = 1.0
        if len(self._totals) > 2 * window:
            earlier = self._totals[-1 - window] - self._totals[-1 - 2 * window]
            kept = min(1.0, max(0.0, int((change * earlier).sum()) / max(1, int((earlier * earlier).sum()))))
        a_call = change * (kept / window) / np.maximum(now, 1)
        return np.rint(np.maximum(0.0, 1 + np.array(calls)[:, None] * a_call) * UNIT).astype(np.int64)


class _ForecastCounts(MaskCounts):
    """Another mask's counts, each head's times a whole number."""

    def __init__(self, base: MaskCounts, growth: np.ndarray) -> None:
        self._base, self._growth = base, growth

    @property
    def rows(self) -> np.ndarray:
        return self._base.rows * self._growth[:, None]

    @property
    def columns(self) -> np.ndarray:
        return self._base.columns * self._growth[:, None]

    def columns_by_rank(self, q_owner: np.ndarray, world: int) -> np.ndarray:
        return self._base.columns_by_rank(q_owner, world) * self._growth[:, None]

    def work_by_slot(self, slots: np.ndarray, ring: int) -> np.ndarray:
        return self._base.work_by_slot(slots, ring) * self._growth[:, None, None]

    def count(self, many: Sequence[np.ndarray], ring: int) -> None:
        self._base.count(many, ring)


@dataclass(frozen=True, eq=False, repr=False)
class ForecastMask(BlockMask):
    """A mask to plan for, whose heads have `growth` (int64[H]) times as many blocks. Nothing to compute with."""

    base: BlockMask
    growth: np.ndarray

    @classmethod
    def of(cls, base: BlockMask, growth: np.ndarray) -> ForecastMask:
        return cls(base.bits, base.grid, base, growth)

    @property
    def counts(self) -> MaskCounts:
        return _ForecastCounts(self.base.counts, self.growth)

    def subdivided(self, grid: BlockGrid) -> BlockMask:
        return self if grid == self.grid else ForecastMask.of(self.base.subdivided(grid), self.growth)


def forecast_offsets(strategy: Strategy) -> tuple[int, ...]:
    """Calls ahead for which plans are tried, beside one for the latest mask: fewer where planning takes longer.

    Over ten layers (scripts/bench/reuse.py, lagged) fewer serve Ulysses a little worse (2, 5, 8: mean ρ_s 1.0307
    instead of 1.0294). Rings of two and four gain 0.5 and 0.3 % by one plan ahead, and one of eight none (1.0355 for
    5.3 plans with it, 1.0338 for 5.1 without): its work is even enough for long.
    """
    if strategy.ring == 1:
        return 1, 3, 5, 7, 9
    return (6,) if strategy.ring <= 4 else ()


def choose_longest_lived(
    mask: BlockMask,
    trend: DensityTrend,
    first: Plan,
    make_later: Callable[[BlockMask], Plan | None],
    *,
    threshold: float,
    budget: float,
    delay: int,
) -> Plan:
    """Of plans made for this mask and for later ones, the one predicted to be kept for most calls;
    with the numbers of the mask at hand.

    trend: has been updated with `mask`;  first: the plan for this mask
    make_later: plans a predicted mask with the same strategy; None from it: plans don't look ahead
    threshold, budget: until when a plan is kept, see `plan_reuse.rule.ReplanRule`
    delay:  calls until the plan is first used
    """
    ahead = forecast_offsets(first.strategy)
    if not ahead:
        return first
    calls = range(delay, delay + HORIZON)
    growth = trend.predict(calls)
    best, plan = _service(first, mask, growth, threshold, budget), first
    if (growth == UNIT).all():
        return first
    for later in trend.predict([delay + calls for calls in ahead]):
        other = make_later(ForecastMask.of(mask, later))
        if other is None:
            break
        service = _service(other, mask, growth, threshold, budget)
        if service > best:
            best, plan = service, other
    if plan is first:
        return first
    compare = first.metrics.baseline_work is not None
    return replace(plan.evaluate(mask, compare=compare), plan_ms=plan.plan_ms)


def _service(plan: Plan, mask: BlockMask, growth: np.ndarray, threshold: float, budget: float) -> tuple[int, float]:
    """(calls for which a plan is predicted to be kept, less what it then wastes): the more the better.

    growth: int64[calls, H], the heads' blocks at each call
    """
    spent = 0.0
    for call, rho in enumerate(_rho_by_call(plan, mask.subdivided(plan.grid), growth)):
        if rho > threshold or spent + rho - 1 > budget:
            return call, -spent
        spent += rho - 1
    return len(growth), -spent


def _rho_by_call(plan: Plan, mask: BlockMask, growth: np.ndarray) -> list[float]:
    """ρ_s of Eq. 1 under `plan` at each call. Sums stay below 2^53, so float64 holds them exactly on every rank."""
    cells = mask.counts.work_by_slot(plan.assignment.keys.slot, plan.strategy.ring)
    heads, world = plan.heads, plan.strategy.world
    place = (np.arange(heads)[:, None] * world + plan.assignment.q_owner).ravel()
    by_slot = [np.bincount(place, cells[..., slot].ravel(), heads * world) for slot in range(plan.strategy.ring)]
    by_head = np.stack(by_slot, axis=-1).reshape(heads, -1)  # float64[H, P · y]
    work = (growth.astype(np.float64) @ by_head).reshape(len(growth), world, plan.strategy.ring)
    work = work_by_ring_step(work, plan.strategy.ulysses)
    total, slowest = work.sum(axis=(1, 2)), work.max(axis=2).sum(axis=1)
    return np.where(total > 0, slowest * world / np.maximum(total, 1), 1.0).tolist()
