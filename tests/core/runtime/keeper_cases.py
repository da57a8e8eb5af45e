"""What the workers run: plans that lag by one call, with counts that arrive late, and planners that go wrong."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cached_property
from itertools import pairwise
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist

from dbsp_core import BlockGrid, BlockMask
from dbsp_core.masks.mask_counts import RowCounts
from dbsp_core.planning.plan import Plan, plan_from_counts
from dbsp_core.runtime.plan_keeper import MakePlan, PlanKeeper, PlanUse
from tests.core.runtime.session_cases import PREDICTED, Session

GRID = BlockGrid.uniform(8 * 16, 16)


def mask_of(*work: int, grid: BlockGrid = GRID) -> BlockMask:
    """Heads with so many active blocks, from the top left on."""
    bits = np.zeros((len(work), grid.nq * grid.nk), dtype=bool)
    for head, dense in zip(bits, work, strict=True):
        head[:dense] = True
    return BlockMask(bits.reshape(-1, grid.nq, grid.nk), grid)


def plans_on(grid: BlockGrid, strategy: str, planner: str = "paper") -> MakePlan:
    """Makes a plan for row counts of masks on a grid."""
    return lambda rows, _current: plan_from_counts(rows, grid, strategy, planner)


class LateCounts(RowCounts):
    """Counts whose copy is there only after a while, another one for each rank and call."""

    def __init__(self, parts: tuple[torch.Tensor, ...]) -> None:
        super().__init__(parts)
        self.there_at = time.monotonic() + _DELAYS.pop(0)

    @cached_property
    def rows(self) -> np.ndarray:
        time.sleep(max(0.0, self.there_at - time.monotonic()))
        return self._host.astype(np.int64)


class HastyKeeper(PlanKeeper):
    """A keeper that keeps a plan if its counts are not there yet: a negative control."""

    def plan_predicted(self, key: Any, mask: BlockMask, make: MakePlan) -> Any:
        last = self._last.get(key)
        if last is not None and isinstance(last.counts, LateCounts) and last.counts.there_at > time.monotonic():
            return last.use
        return super().plan_predicted(key, mask, make)


_DELAYS: list[float] = []


def plans_with_late_counts(rank: int, world: int, hasty: bool) -> list[int]:
    """Six calls whose masks ask for new plans; counts of odd ranks are late at odd calls. Returns plans by call."""
    draws = np.random.default_rng(0)
    masks = [mask_of(*draws.integers(1, 60, 2 * world)) for _ in range(6)]
    _DELAYS[:] = [0.2 * ((rank + call) % 2) for call in range(6)]
    keeper, make = (HastyKeeper if hasty else PlanKeeper)(1.0, False), plans_on(GRID, f"U{world}R1", "snake")
    with mock.patch("dbsp_core.masks.mask_counts.RowCounts", LateCounts):
        return [keeper.plan_predicted("layer", mask, make).plan.fingerprint for mask in masks]


def planner_that_goes_wrong(rank: int, world: int, odd: int, fault: str) -> list[str]:
    """Six calls of a session, in the third of which a rank's planner raises, or makes another plan.

    Returns what each call raised.
    """
    session = Session(PREDICTED | {"reuse": 1.0}, f"U{world}R1")
    raised = []
    for call in range(4):
        patched = _faulty(fault) if (rank, call) == (odd, 2) else plan_from_counts
        with mock.patch("dbsp_core.runtime.size_context.plan_from_counts", patched):
            try:
                session.attend(900.0 - call)
                raised.append("")
            except ValueError as error:
                raised.append(f"{type(error).__name__}: {error}")
    dist.barrier()
    return raised


def _faulty(fault: str) -> Callable[..., Plan]:
    def make(*args: Any, **options: Any) -> Plan:
        if fault == "raises":
            raise ZeroDivisionError("no planner today")
        return plan_from_counts(*args, **(options | {"planner": "contiguous"}))

    return make


def two_generations(rank: int, world: int, steps: int, threshold: float) -> list[tuple[bool, float, bool]]:
    """Two generations of few steps.

    Returns by step whether a plan was made for it, ρ_s in use, and whether the plan is that of the step before; at the
    second generation's first step, that of the first generation's second step.
    """
    session = Session(PREDICTED | {"reuse": threshold}, f"U{world}R1", steps=steps)
    uses: list[PlanUse] = []
    for step in range(2 * steps):
        assert session.attend(900.0 - step % steps) <= 1e-5
        (last,) = session.inner._now.keeper._last.values()
        uses.append(last.use)
    session.inner.flush()
    rho = [use.counted.rho for use in uses if use.counted is not None]
    same = [False, *(use.plan.same_routes(before.plan) for before, use in pairwise(uses))]
    same[steps] = uses[steps].plan.same_routes(uses[1].plan)
    return list(zip((use.new for use in uses), rho, same, strict=True))
