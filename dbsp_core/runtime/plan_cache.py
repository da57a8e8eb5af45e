"""Keeping plans while they are good enough (paper §4.2.1, threshold P_s), and making new ones behind the scenes."""

from __future__ import annotations

import functools
import traceback
import weakref
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist

from dbsp_core.comm.consistency import check_consistent
from dbsp_core.comm.groups import SequenceGroup
from dbsp_core.layout.strategy import Strategy
from dbsp_core.masks.block_mask import BlockMask
from dbsp_core.planning.plan import Plan
from dbsp_core.runtime.forecast import DensityTrend, choose_longest_lived
from dbsp_core.runtime.planning_thread import Background
from dbsp_core.runtime.rank_plan import RankPlan

__all__ = ["AsyncPlanCache", "PlanCache", "Planned", "ReplanRule", "ReuseCounters"]

PLANS_DIFFER = "the plan differs on rank(s) {}; all ranks must compute the same masks"

MakePlan = Callable[[BlockMask, Plan | None], Plan]
"""make(mask, the plan in use or None): the plan for a mask"""
PlanAgain = Callable[[BlockMask, Strategy], Plan]
"""again(mask, strategy): the plan for a mask with that strategy"""
PreparePart = Callable[[Plan], RankPlan]
"""prepare(plan): this rank's part in a plan, on the host"""


@dataclass(frozen=True)
class Planned:
    """A plan to use, and this rank's part in it where that was prepared beforehand: they belong together."""

    plan: Plan
    part: RankPlan | None = None


@dataclass(frozen=True)
class ReplanRule:
    """When a plan has served its time.

    threshold: P_s of the paper: it is kept while ρ_s of the current mask under it stays at or below this
    budget:    and while what it has wasted, Σ over its calls of ρ_s less the least that was known to be possible when
               it was made, stays at or below this; in times of a balanced attention. New plans then look ahead (see
               `dbsp_core.runtime.forecast`). None: the threshold alone, and every plan is for the mask at hand.
    """

    threshold: float = 1.10
    budget: float | None = None


@dataclass
class PlanUsage:
    """What one attention's plan has done so far. floor: ρ_s of the best plan known when it was made"""

    floor: float = 1.0
    spent: float = 0.0
    trend: DensityTrend = field(default_factory=DensityTrend)

    def watch(self, mask: BlockMask, rule: ReplanRule) -> None:
        """Follows where masks are going, where that is asked for."""
        if rule.budget is not None:
            self.trend.note(mask)

    def ended(self, used: Plan, rule: ReplanRule) -> bool:
        """Takes note of a call that `used` served, or would serve. returns: whether it should be the last"""
        self.spent += max(0.0, used.rho - self.floor)
        return used.rho > rule.threshold or (rule.budget is not None and self.spent > rule.budget)

    def ends_with(self, used: Plan, rule: ReplanRule) -> bool:
        """Whether `ended` would say so of one more call, which is not taken note of."""
        return replace(self, trend=DensityTrend()).ended(used, rule)

    def begin(self, mask: BlockMask, made: Plan, again: PlanAgain | None, rule: ReplanRule, lead: int) -> Plan:
        """The plan to use after `lead` calls, where `made` is the one for this mask."""
        self.floor, self.spent = made.rho, 0.0
        if rule.budget is None or again is None:
            return made
        chosen = choose_longest_lived(
            mask,
            self.trend,
            made,
            lambda later: again(later, made.strategy),
            threshold=rule.threshold,
            budget=rule.budget,
            lead=lead,
        )
        if lead == 0:
            self.spent = max(0.0, chosen.rho - self.floor)
        return chosen


@dataclass
class ReuseCounters:
    """What became of plans.

    calls:     attentions asked for
    replans:   plans made
    judged:    masks whose ρ_s under the plan in use is known
    rho_used:  its sum over those, and `worst_used` its maximum
    rho_bound: sum over the same of the ρ_s that no plan can beat
    """

    calls: int = 0
    replans: int = 0
    judged: int = 0
    rho_used: float = 0.0
    worst_used: float = 1.0
    rho_bound: float = 0.0

    def judge(self, plan: Plan) -> None:
        """Takes note of a plan with the numbers of the mask it was used for."""
        self.judged += 1
        self.rho_used += plan.rho
        self.worst_used = max(self.worst_used, plan.rho)
        self.rho_bound += plan.rho_bound


@dataclass
class PlanCache:
    """One plan per attention, kept as long as `rule` says.

    An attention is a layer's, and a guidance branch's where branches have masks of their own. Whether to keep a plan
    follows from the masks' bits and the kept plan alone, which all ranks share: no rank can decide otherwise than the
    others. Every call waits for its mask to be counted.
    compare: whether plans tell what the contiguous plan would do; see `dbsp_core.planning.plan.make_plan`
    """

    rule: ReplanRule
    counters: ReuseCounters = field(default_factory=ReuseCounters)
    compare: bool = True
    latest: dict[Hashable, Plan] = field(default_factory=dict)
    """By attention, its plan with the numbers of the mask it was last used for."""
    _services: dict[Hashable, PlanUsage] = field(default_factory=dict)

    def plan_for(
        self,
        key: Hashable,
        mask: BlockMask,
        make: MakePlan,
        again: PlanAgain | None = None,
        prepare: PreparePart | None = None,
    ) -> Planned:
        """The kept plan if it still serves, else a new one; with this mask's numbers.

        again:   for plans that look ahead, without which none does
        prepare: not needed here, where a plan is used at once
        """
        self.counters.calls += 1
        service = self._services.setdefault(key, PlanUsage())
        service.watch(mask, self.rule)
        plan = self.latest.get(key)
        reused = plan.reused_for(mask, compare=self.compare) if plan is not None and _fits(plan, mask) else None
        if reused is None or service.ended(reused, self.rule):
            self.counters.replans += 1
            reused = service.begin(mask, make(mask, plan), again, self.rule, lead=0)
        self.counters.judge(reused)
        self.latest[key] = reused
        return Planned(reused)

    def count_reuse(self, key: Hashable, plan: Plan) -> bool:
        """Counts one more call of an attention with a mask that `plan` has the numbers of.

        returns: False, and counts nothing, where the plan has expired: a new one is to be made for the mask
        """
        return _count_reuse(self, key, plan)

    def forget(self, key: Hashable) -> None:
        """Drops what is kept for an attention."""
        self.latest.pop(key, None)
        self._services.pop(key, None)

    def start(self) -> None:
        """Nothing is ever due."""

    def settle(self) -> None:
        """Nothing is ever pending."""


@dataclass(frozen=True)
class Evaluation:
    """used: the plan in use with the numbers of the mask it was used for;  next: what the next call uses"""

    used: Plan
    next: Planned


@dataclass(frozen=True)
class _Call:
    """What the thread is given of a call; see `AsyncPlanCache.plan_for`. event: on its stream, behind its mask"""

    plan: Plan
    service: PlanUsage
    mask: BlockMask
    make: MakePlan
    again: PlanAgain | None
    prepare: PreparePart | None
    event: torch.cuda.Event | None


@dataclass
class AsyncPlanCache:
    """As `PlanCache`, one call behind: a call uses the plan that was settled for the last one, and never waits for its
    own mask to be counted.

    While a call computes, a thread judges its mask under the plan in use, makes a new plan where `rule` asks for one,
    and compares notes with the other ranks over a process group of its own. The next call of that attention adopts the
    outcome, waiting for it if it is late: so all ranks change plans at the same call. What went wrong in the thread,
    on any rank, is raised at that call on every rank. An attention's first call plans at once.
    """

    rule: ReplanRule
    group: SequenceGroup
    counters: ReuseCounters = field(default_factory=ReuseCounters)
    compare: bool = True
    latest: dict[Hashable, Plan] = field(default_factory=dict)
    _plans: dict[Hashable, Planned] = field(default_factory=dict)
    _services: dict[Hashable, PlanUsage] = field(default_factory=dict)
    _due: dict[Hashable, _Call] = field(default_factory=dict)
    _pending: dict[Hashable, Future[Evaluation]] = field(default_factory=dict)
    _notes: SequenceGroup = field(init=False)
    _background: Background = field(init=False)
    _side_streams: dict[torch.device, torch.cuda.Stream] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._notes = self.group.beside("planning")  # in the calling thread: making a group is a collective
        self._background = _thread_of(self._notes)

    def plan_for(
        self,
        key: Hashable,
        mask: BlockMask,
        make: MakePlan,
        again: PlanAgain | None = None,
        prepare: PreparePart | None = None,
    ) -> Planned:
        """The plan to use for this call; its numbers are those of the mask it was made for.

        again:   for plans that look ahead, without which none does
        prepare: called in the thread with a new plan that the next call will adopt
        Raises RuntimeError on every rank when planning failed, or plans differed, on any.
        """
        self.counters.calls += 1
        self._adopt(key)
        planned = self._plans.get(key)
        if planned is None or not _fits(planned.plan, mask):
            self.counters.replans += 1
            planned = Planned(make(mask, None if planned is None else planned.plan))
            self._services[key] = PlanUsage(floor=planned.plan.rho)
        self._plans[key] = Planned(planned.plan)  # whoever gets the part keeps it
        event = torch.cuda.current_stream(mask.bits.device).record_event() if mask.bits.is_cuda else None
        self._due[key] = _Call(planned.plan, self._services[key], mask, make, again, prepare, event)
        return planned

    def start(self) -> None:
        """Lets the thread judge what was asked for since: best when the calls' own work is queued on the device.

        It would slow this thread down until then. Whatever waits for the thread starts it too.
        """
        for key in list(self._due):
            self._pending[key] = self._background.submit(functools.partial(self._judge, self._due.pop(key)))

    def count_reuse(self, key: Hashable, plan: Plan) -> bool:
        """As `PlanCache.count_reuse`, for the plan as the next call would have it."""
        self._adopt(key)
        planned = self._plans.setdefault(key, Planned(plan))
        return planned.plan.same_route(plan) and _count_reuse(self, key, plan)

    def forget(self, key: Hashable) -> None:
        """Drops what is kept for an attention, once nothing is pending for it."""
        self._adopt(key)
        for kept in (self.latest, self._plans, self._services):
            kept.pop(key, None)

    def settle(self) -> None:
        """Waits for what is pending, so that counters and `latest` cover every call."""
        self.start()
        for key in list(self._pending):
            self._adopt(key)

    def _adopt(self, key: Hashable) -> None:
        if key in self._due:
            self.start()
        pending = self._pending.pop(key, None)
        if pending is None:
            return
        limit = None if self.group.timeout is None else self.group.timeout.total_seconds()
        try:
            verdict = pending.result(limit)
        except FutureTimeoutError as error:
            raise RuntimeError(
                f"the planning thread of rank {self.group.rank} has not answered for {limit:g} s, the process group's "
                "timeout; something in it stands still"
            ) from error
        self.counters.judge(verdict.used)
        self.counters.replans += verdict.next.plan is not verdict.used
        self.latest[key], self._plans[key] = verdict.used, verdict.next

    def _judge(self, call: _Call) -> Evaluation:
        """In the thread. Collective on its own group."""
        problem: Exception | None = None
        verdict, mark = None, 0
        try:
            verdict = self._evaluate(call)
            mark = verdict.next.plan.fingerprint
        except Exception:
            problem = RuntimeError(f"planning failed:\n{traceback.format_exc()}")
        check_consistent(self._notes, problem, {PLANS_DIFFER: mark}, torch.device("cpu"), RuntimeError)
        if verdict is None:
            raise RuntimeError("planning failed") from problem
        return verdict

    def _evaluate(self, call: _Call) -> Evaluation:
        plan, service, mask = call.plan, call.service, call.mask
        with self._beside(mask.bits.device, call.event):
            service.watch(mask, self.rule)
            used = chosen = plan.reused_for(mask, compare=self.compare)
            if service.ended(used, self.rule):
                chosen = service.begin(mask, call.make(mask, plan), call.again, self.rule, lead=1)
        changes = chosen is not used and not chosen.same_route(plan)
        return Evaluation(
            used, Planned(chosen, call.prepare(chosen) if call.prepare is not None and changes else None)
        )

    def _beside(self, device: torch.device, event: torch.cuda.Event | None) -> AbstractContextManager[object]:
        """A stream of the thread's own, behind the mask alone: what else the device computes is not waited for."""
        if event is None:
            return nullcontext()
        if device not in self._side_streams:
            self._side_streams[device] = torch.cuda.Stream(device)
        self._side_streams[device].wait_event(event)
        return torch.cuda.stream(self._side_streams[device])


_THREADS: weakref.WeakKeyDictionary[dist.ProcessGroup, Background] = weakref.WeakKeyDictionary()


def _thread_of(notes: SequenceGroup) -> Background:
    """One thread for all that use a group of this kind: two would enter its collectives in any order."""
    if notes.group is None:
        return Background()
    return _THREADS.setdefault(notes.group, Background())


def _count_reuse(cache: PlanCache | AsyncPlanCache, key: Hashable, plan: Plan) -> bool:
    """Counts one more call that `plan` serves, unless it has expired."""
    service = cache._services.setdefault(key, PlanUsage(floor=plan.rho))
    if service.ends_with(plan, cache.rule):
        return False
    service.ended(plan, cache.rule)
    cache.counters.calls += 1
    cache.counters.judge(plan)
    cache.latest[key] = plan
    return True


def _fits(plan: Plan, mask: BlockMask) -> bool:
    return plan.heads == mask.heads and (plan.grid == mask.grid or plan.grid.subdivides(mask.grid))
