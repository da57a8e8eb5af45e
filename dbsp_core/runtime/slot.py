"""State of one attention: its mask, plan, tables, and counts in flight."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from dbsp_core.masks.block_mask import BlockMask
from dbsp_core.masks.grid import Video
from dbsp_core.masks.mask_counts import RowCounts
from dbsp_core.masks.steps import DenoisingStep
from dbsp_core.planning.plan import Plan
from dbsp_core.planning.reuse import MakePlan, PlanUse, ReuseStatistics, UsualCounts, next_use
from dbsp_core.runtime.prepared import KnownMask, PreparedAttention


@dataclass(eq=False)
class Slot:
    """One attention of one video size: a layer in a CFG pass."""

    key: tuple[tuple[Video, ...], int, int]  # The videos, the layer and the CFG pass
    threshold: float  # P_s, largest ρ_s at which a plan is kept; see `dbsp_core.planning.reuse`
    lags: bool  # True if predicted masks use plans by earlier counts; False: by their own counts, waiting for them
    compare: bool  # True to compare plans with the contiguous plan; see `make_plan`
    statistics: ReuseStatistics  # Sums over the session's calls
    usual: UsualCounts = field(default_factory=UsualCounts)  # Mean counts of predicted masks by step
    known: KnownMask | None = None  # Static mask of the last call, or None
    prepared: PreparedAttention | None = None  # Prepared attention of the last call
    use: PlanUse | None = None  # Last call with a changing mask

    def plan_known(self, known: KnownMask, mask: BlockMask, make: MakePlan) -> PlanUse:
        """Returns the plan for a static mask that changes: the last plan while it fits, else a new one.

        Waits for the mask's counts. `keep` stores the result.
        """
        last = known.plan if known.shares_plan else self.counted()
        return self._use_by_own_counts(last, mask, mask.counts.rows, make)

    def next_use(self, q: torch.Tensor, now: DenoisingStep, make: MakePlan) -> PlanUse | None:
        """Returns the next call's plan before its mask is predicted, or None if the plan needs the mask's counts.

        Waits for the counts of the last call. `keep` stores the result. For q [B, H, n_local, D], plans cover H heads,
        or B · H with masks per item.
        """
        counted, use, heads = self.counted(), self.use, (q.shape[1], q.shape[0] * q.shape[1])
        if not self.lags or counted is None or use is None or use.counts is None or counted.heads not in heads:
            return None
        rows = use.counts.rows
        expected = self.usual.expected(rows, use.moment, now)
        if expected is not rows:
            counted = counted.counted(expected, compare=False)
        return next_use(counted, expected, self.threshold, make)

    def use_predicted(self, mask: BlockMask, use: PlanUse | None, make: MakePlan, now: DenoisingStep) -> PlanUse:
        """Returns `use` with its predicted mask, whose counts are read at the next call.

        Without `use`, or if its plan does not fit the mask, plans by the mask's counts and waits for them.
        """
        counts = RowCounts(*(part.bits for part in mask.parts))
        if use is None or not use.plan.fits(mask):
            last, start = self.counted(), time.perf_counter()
            rows, arrived = counts.rows, time.perf_counter()
            use = self._use_by_own_counts(last, mask, rows, make)
            self.statistics.waits += 1
            self.statistics.wait_s += arrived - start
            self.statistics.plan_s += time.perf_counter() - arrived
        use.counts, use.moment = counts, now
        return use

    def _use_by_own_counts(self, last: Plan | None, mask: BlockMask, rows: np.ndarray, make: MakePlan) -> PlanUse:
        """Returns a call with a mask of known counts int64[H, nq]: the last plan while balanced, else a new one."""
        if last is None or not last.fits(mask):
            use = PlanUse(make(rows, last), True)
        else:
            use = next_use(last.counted(rows, compare=self.compare), rows, self.threshold, make)
        use.counted = use.plan
        return use

    def keep(self, known: KnownMask | None, prepared: PreparedAttention, use: PlanUse) -> None:
        """Stores a call's mask, plan and tables."""
        # 1. Plan, with statistics of the call's mask if known
        self.statistics.calls += 1
        self.statistics.plans += use.new
        if use.counted is not None:
            self._count(use.counted)
        if known is not None and known.replaces:  # keep plan and tables of predicted masks
            known.plan, known.prepared = use.plan, prepared
            self.statistics.replaced[self.key[1]] += 1
            return
        if known is not None:
            known.prepared = prepared
        elif prepared.branch is not None:
            # The branch belongs to one call and holds tensors as large as q.
            prepared = replace(prepared, branch=None)
        if known is not None and known.shares_plan:
            known.plan = use.plan
        else:
            if self.use is not None and self.use.counts is not None:
                self.usual.add(self.use.counts.rows, self.use.moment.step)
            self.use = use
        # 2. Mask, which drops its tables after its last user
        if known is not self.known:
            if known is not None:
                known.users += 1
            if self.known is not None:
                self.known.release()
        self.known, self.prepared = known, prepared

    def counted(self) -> Plan | None:
        """Returns the plan of the last call with a changing mask, with that mask's statistics. Waits for counts."""
        use = self.use
        if use is None:
            return None
        if use.counted is None and use.counts is not None:
            use.counted = use.plan.counted(use.counts.rows, compare=self.compare)
            self._count(use.counted)
        return use.counted or use.plan

    def _count(self, plan: Plan) -> None:
        """Adds a call's plan, with the statistics of its mask, to the sums."""
        self.statistics.counted += 1
        self.statistics.rho_sum += plan.rho
        self.statistics.worst_rho = max(self.statistics.worst_rho, plan.rho)
        self.statistics.dense += plan.density == 1

    def last_plan(self) -> Plan | None:
        """Returns the last call's plan with the statistics of its mask. Waits for counts."""
        if self.known is None or self.prepared is None:
            return self.counted()
        return self.prepared.plan

    def restart(self) -> None:
        """Drops plan, tables and usual counts of predicted masks; the next call makes a new plan."""
        self.counted()
        if self.use is not None and self.use.counts is not None:
            self.use = None
        if self.known is None:
            self.prepared = None
        self.usual = UsualCounts()

    def close(self) -> None:
        """Reads counts in flight, and releases the static mask."""
        self.counted()
        if self.known is not None:
            self.known.release()
        self.known = self.prepared = None
