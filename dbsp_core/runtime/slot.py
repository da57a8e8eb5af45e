"""What is kept of one attention: its mask, its plan, its tables and the counts that are under way."""

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
    """One attention of one size of video: a layer in a CFG pass.

    Attributes:
        key: The videos, the layer and the CFG pass.
        threshold: P_s, the largest ρ_s up to which a plan is kept; see `dbsp_core.planning.reuse`.
        lags: True if predicted masks have plans by the counts before them; False: by their own, which are waited for.
        compare: True if plans are compared with the contiguous plan; see `make_plan`.
        statistics: Sums over the calls of a session.
        usual: Mean counts of its predicted masks, by step.
        known: The mask of its last call, if that was known without q and k.
        prepared: What its last call was computed with.
        use: Its last call with a mask that changes.
    """

    key: tuple[tuple[Video, ...], int, int]
    threshold: float
    lags: bool
    compare: bool
    statistics: ReuseStatistics
    usual: UsualCounts = field(default_factory=UsualCounts)
    known: KnownMask | None = None
    prepared: PreparedAttention | None = None
    use: PlanUse | None = None

    def plan_known(self, known: KnownMask, mask: BlockMask, make: MakePlan) -> PlanUse:
        """Returns the plan for a mask that is known beforehand: the last one while it fits, else a new one.

        Waits for the mask's counts. Nothing is kept before `keep`.
        """
        last = known.plan if known.shares_plan else self.counted()
        return self._use_by_own_counts(last, mask, mask.counts.rows, make)

    def next_use(self, q: torch.Tensor, now: DenoisingStep, make: MakePlan) -> PlanUse | None:
        """Returns the next call's plan before its mask is predicted; None if that mask's own counts decide.

        Waits for the counts of the last call. Nothing is kept before `keep`.

        Args:
            q: [B, H, n_local, D]. A plan is for all items of a batch, or for each item's heads.
            now: The call's step and generation.
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
        """Returns `next_use` with its mask, whose counts are read at the next call.

        If there was none, or its plan does not fit the mask, the call's own counts decide, and are waited for.
        """
        counts = RowCounts(*(part.bits for part in mask.parts))
        if use is None or not use.plan.fits(mask):
            last, start = self.counted(), time.perf_counter()
            rows, arrived = counts.rows, time.perf_counter()
            use = self._use_by_own_counts(last, mask, rows, make)
            self.statistics.waited(arrived - start, time.perf_counter() - arrived)
        use.counts, use.moment = counts, now
        return use

    def _use_by_own_counts(self, last: Plan | None, mask: BlockMask, rows: np.ndarray, make: MakePlan) -> PlanUse:
        """Returns a call with a mask of known counts int64[H, nq]: the last plan while it is balanced, or another."""
        if last is None or not last.fits(mask):
            use = PlanUse(make(rows, last), True)
        else:
            use = next_use(last.counted(rows, compare=self.compare), rows, self.threshold, make)
        use.counted = use.plan
        return use

    def keep(self, known: KnownMask | None, prepared: PreparedAttention, use: PlanUse) -> None:
        """Keeps what a call was computed with."""
        # 1. The plan in use. Its numbers are those of the call's own mask, if that is known.
        self.statistics.calls += 1
        self.statistics.plans += use.new
        if use.counted is not None:
            self._count(use.counted)
        if known is not None and known.replaces:  # plan and tables of predicted masks stay, for the next one
            known.plan, known.prepared = use.plan, prepared
            self.statistics.replaced[self.key[1]] += 1
            return
        if known is not None:
            known.prepared = prepared
        elif prepared.branch is not None:
            # It belongs to one call, and holds tensors as large as q: layers must not keep it.
            prepared = replace(prepared, branch=None)
        if known is not None and known.shares_plan:
            known.plan = use.plan
        else:
            if self.use is not None and self.use.counts is not None:
                self.usual.add(self.use.counts.rows, self.use.moment.step)
            self.use = use
        # 2. The mask, which drops its tables when no attention has it any longer.
        if known is not self.known:
            if known is not None:
                known.users += 1
            if self.known is not None:
                self.known.release()
        self.known, self.prepared = known, prepared

    def counted(self) -> Plan | None:
        """Returns the plan of the last call with a mask that changes, with that mask's numbers. Waits for them."""
        use = self.use
        if use is None:
            return None
        if use.counted is None and use.counts is not None:
            use.counted = use.plan.counted(use.counts.rows, compare=self.compare)
            self._count(use.counted)
        return use.counted or use.plan

    def _count(self, plan: Plan) -> None:
        """Adds the plan of a call, with the numbers of the call's own mask, to the statistics."""
        self.statistics.counted += 1
        self.statistics.rho_sum += plan.rho
        self.statistics.worst_rho = max(self.statistics.worst_rho, plan.rho)
        self.statistics.dense += plan.density == 1

    def last_plan(self) -> Plan | None:
        """Returns the plan of the last call with the numbers of its mask. Waits for its counts."""
        if self.known is None or self.prepared is None:
            return self.counted()
        return self.prepared.plan

    def restart(self) -> None:
        """Drops the plan and the tables of a predicted mask, and what was usual: the next call plans at once."""
        self.counted()
        if self.use is not None and self.use.counts is not None:
            self.use = None
        if self.known is None:
            self.prepared = None
        self.usual = UsualCounts()

    def close(self) -> None:
        """Reads the counts under way, and drops what no other attention uses."""
        self.counted()
        if self.known is not None:
            self.known.release()
        self.known = self.prepared = None
