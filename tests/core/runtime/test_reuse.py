"""Plans are kept while they serve: worked out with two Ulysses columns and two heads each."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from unittest import mock

import pytest
import torch

from dbsp_core import BlockGrid, BlockMask, Plan, SequenceGroup, make_plan
from dbsp_core.config import DbspConfig
from dbsp_core.layout.strategy import Strategy
from dbsp_core.runtime.async_plan_cache import AsyncPlanCache
from dbsp_core.runtime.plan_cache import KeptPlan, PlanCache
from dbsp_core.runtime.session import AttentionSession
from dbsp_core.runtime.size_context import plan_cache_of
from dbsp_core.sources import SpargeSource, WindowSource
from tests.core.runtime.reuse_cases import mask_of, plan_where_one_rank_goes_wrong, timeouts, two_caches_of_one_group
from tests.support.workers import WorkerError


def plan_u2(mask: BlockMask, _current: Plan | None = None) -> Plan:
    return make_plan(mask, "U2R1", "paper")


FIRST = mask_of(6, 4, 4, 2)
"""Heads 0 and 3 go to one column, 1 and 2 to the other: 8 and 8."""
AT_THRESHOLD = mask_of(6, 4, 2, 4)
"""Under that plan 10 and 6: ρ_s = 10 / (16 / 2) = 1.25."""
ABOVE = mask_of(7, 3, 2, 4)
"""Under that plan 11 and 5: ρ_s = 1.375. Planned again: heads 0 and 2, heads 1 and 3, hence 9 and 7."""


@pytest.fixture
def cache():
    cache = PlanCache(1.25)
    assert cache.plan_for(0, FIRST, plan_u2).plan.rho == 1.0
    return cache


def test_a_plan_is_kept_up_to_the_threshold_with_the_numbers_of_the_new_mask(cache):
    first = cache.plan_for(0, FIRST, plan_u2).plan
    kept = cache.plan_for(0, AT_THRESHOLD, plan_u2).plan
    assert kept.fingerprint == first.fingerprint
    assert kept.rho == 1.25
    assert (cache.counters.calls, cache.counters.replans) == (3, 1)


def test_above_the_threshold_a_new_plan_is_made_and_kept_from_then_on(cache):
    plan = cache.plan_for(0, ABOVE, plan_u2).plan
    assert plan.fingerprint == plan_u2(ABOVE).fingerprint != plan_u2(FIRST).fingerprint
    assert plan.rho == 9 / 8
    assert cache.plan_for(0, ABOVE, plan_u2).plan.fingerprint == plan.fingerprint
    assert (cache.counters.calls, cache.counters.replans) == (3, 2)


def test_every_layer_has_a_plan_of_its_own(cache):
    cache.plan_for(1, AT_THRESHOLD, plan_u2)
    assert cache.plan_for(0, FIRST, plan_u2).plan.fingerprint == plan_u2(FIRST).fingerprint
    assert cache.plan_for(1, AT_THRESHOLD, plan_u2).plan.fingerprint == plan_u2(AT_THRESHOLD).fingerprint
    assert (cache.counters.calls, cache.counters.replans) == (4, 2)


@pytest.mark.parametrize(
    "mask", [mask_of(6, 4, 4, 2, grid=BlockGrid.uniform(9 * 16, 16)), mask_of(6, 4, 4)], ids=["grid", "heads"]
)
def test_another_grid_or_number_of_heads_needs_a_new_plan(cache, mask):
    plan = cache.plan_for(0, mask, plan_u2).plan
    assert (plan.grid, plan.heads) == (mask.grid, mask.heads)
    assert cache.counters.replans == 2


UNEVEN = mask_of(9, 1, 1, 1)
"""The best plan: 9 and 3, hence ρ_s = 1.5."""
MIRRORED = mask_of(1, 1, 1, 9)
"""Under that plan at least as uneven, and as uneven under its own."""


class TestAMaskWhoseBestPlanIsAboveTheThreshold:
    @pytest.mark.parametrize("kind", [PlanCache, AsyncPlanCache])
    def test_is_planned_once(self, kind):
        group = {"group": SequenceGroup(0, 1)} if kind is AsyncPlanCache else {}
        cache = kind(1.25, **group)
        plan = cache.plan_for(0, UNEVEN, plan_u2, "uneven").plan
        assert plan.rho == 1.5
        for _ in range(8):
            assert cache.count_reuse(0, plan, "uneven")
        assert (cache.counters.calls, cache.counters.replans) == (9, 1)

    @pytest.mark.parametrize("kind", [PlanCache, AsyncPlanCache])
    def test_is_planned_once_after_others(self, kind):
        group = {"group": SequenceGroup(0, 1)} if kind is AsyncPlanCache else {}
        cache = kind(1.25, **group)
        cache.plan_for(0, FIRST, plan_u2, "first")
        for _ in range(4):
            cache.plan_for(0, UNEVEN, plan_u2, "uneven")
        cache.flush()
        assert (cache.counters.calls, cache.counters.replans) == (5, 2)
        assert cache.latest[0].rho == 1.5

    def test_a_plan_made_for_another_mask_expires(self):
        cache = PlanCache(1.25)
        for mask, name in ((UNEVEN, "uneven"), (MIRRORED, "mirrored"), (UNEVEN, "uneven"), (UNEVEN, "uneven")):
            assert cache.plan_for(0, mask, plan_u2, name).plan.rho == 1.5
        assert cache.counters.replans == 3

    def test_without_a_name_it_could_be_any_mask(self):
        cache = PlanCache(1.25)
        for _ in range(3):
            cache.plan_for(0, UNEVEN, plan_u2)
        assert cache.counters.replans == 3

    def test_another_plan_than_the_one_made_for_it_expires(self):
        kept = KeptPlan.new(plan_u2(UNEVEN), "uneven")
        assert not kept.used_with(plan_u2(UNEVEN)).expired(1.25, "uneven")
        assert kept.used_with(plan_u2(MIRRORED).counted(UNEVEN)).expired(1.25, "uneven")
        assert kept.used_with(plan_u2(UNEVEN).counted(MIRRORED)).expired(1.25, "mirrored")


class TestPlannedAsync:
    """One process: what a call adopts was settled at the call before."""

    @pytest.fixture
    def planned_async(self):
        return AsyncPlanCache(1.25, group=SequenceGroup(0, 1))

    def test_the_first_call_plans_at_once(self, planned_async):
        assert planned_async.plan_for(0, FIRST, plan_u2).plan.fingerprint == plan_u2(FIRST).fingerprint

    def test_a_new_plan_is_adopted_one_call_later(self, planned_async):
        masks = [FIRST, ABOVE, ABOVE, ABOVE, FIRST]
        plans = [planned_async.plan_for(0, mask, plan_u2).plan.fingerprint for mask in masks]
        old, new = plan_u2(FIRST).fingerprint, plan_u2(ABOVE).fingerprint
        assert old != new
        assert plans == [old, old, new, new, new]

    def test_counters_cover_every_call_once_settled(self, planned_async):
        for mask in (FIRST, ABOVE, ABOVE):
            planned_async.plan_for(0, mask, plan_u2)
        planned_async.flush()
        counters = planned_async.counters
        assert (counters.calls, counters.replans, counters.evaluated) == (3, 2, 3)
        assert counters.rho_used == 1.0 + 1.375 + 9 / 8
        assert counters.worst_used == 1.375
        assert planned_async.latest[0].rho == 9 / 8

    def test_at_the_threshold_the_plan_is_kept(self, planned_async):
        for mask in (FIRST, AT_THRESHOLD, FIRST):
            plan = planned_async.plan_for(0, mask, plan_u2).plan
        assert plan.fingerprint == plan_u2(FIRST).fingerprint
        assert planned_async.counters.replans == 1

    def test_attentions_do_not_mix(self, planned_async):
        for _ in range(2):
            planned_async.plan_for("cond", FIRST, plan_u2)
            planned_async.plan_for("uncond", ABOVE, plan_u2)
        planned_async.flush()
        assert planned_async.latest["cond"].rho == 1.0
        assert planned_async.latest["uncond"].rho == 9 / 8
        assert planned_async.counters.replans == 2

    def test_what_went_wrong_is_raised_at_the_next_call_with_its_traceback(self, planned_async):
        planned_async.plan_for(0, FIRST, plan_u2)

        def fail(mask: BlockMask, _current: Plan | None = None) -> Plan:
            raise ZeroDivisionError("no planner today")

        planned_async.plan_for(0, ABOVE, fail)
        with pytest.raises(RuntimeError, match=r"(?s)planning failed.*Traceback.*no planner today"):
            planned_async.plan_for(0, ABOVE, plan_u2)


class TestStandingStill:
    def test_a_thread_that_stands_still_is_waited_for_as_long_as_the_group_would_wait(self, monkeypatch):
        monkeypatch.setattr(SequenceGroup, "timeout", timedelta(seconds=0.05))
        cache, answer = AsyncPlanCache(1.25, group=SequenceGroup(0, 1)), threading.Event()

        def stand_still(mask: BlockMask, _current: Plan | None = None) -> Plan:
            answer.wait(30)  # ends a hang
            return plan_u2(mask)

        cache.plan_for(0, FIRST, plan_u2)
        cache.plan_for(0, ABOVE, stand_still)
        try:
            with pytest.raises(RuntimeError, match=r"planning thread of rank 0 has not answered for 0\.05 s"):
                cache.flush()
        finally:
            answer.set()

    def test_groups_beside_another_have_its_timeout(self, pool):
        assert pool(2).run(timeouts, 77.0) == [[77.0] * 4] * 2


@pytest.mark.parametrize(("world", "odd"), [(2, 0), (3, 2)])
@pytest.mark.parametrize(("fault", "message"), [("raises", "no planner today"), ("differs", "the plan differs on")])
def test_a_planner_that_goes_wrong_on_one_rank_is_raised_on_all(pool, world, odd, fault, message):
    with pytest.raises(WorkerError) as raised:
        pool(world).run(plan_where_one_rank_goes_wrong, odd, fault)
    errors = raised.value.errors
    assert [rank for rank, *_ in errors] == list(range(world))
    assert all(kind == "RuntimeError" and message in text for _, kind, text in errors), errors


def test_caches_of_one_group_compare_notes_in_one_order(pool):
    answers = pool(3).run(two_caches_of_one_group)
    assert all(answer == answers[0] for answer in answers)
    assert answers[0][0] != answers[0][1]


def test_ranks_that_agree_go_on(pool):
    answers = pool(3).run(plan_where_one_rank_goes_wrong, 1, "nothing")
    assert all(answer == answers[0] for answer in answers)
    assert len(set(answers[0])) == 2  # the first call's mask for two calls, then the second's


@pytest.mark.parametrize(("mask", "kind"), [(SpargeSource(cdf=0.9), AsyncPlanCache), (WindowSource(), PlanCache)])
def test_masks_from_queries_and_keys_are_planned_one_call_behind(mask, kind):
    session = AttentionSession(DbspConfig(mask=mask), SequenceGroup(0, 1), Strategy(1, 1), heads=2, layers=1)
    assert type(plan_cache_of(session._parts)) is kind


def test_planning_thread_works_on_the_device_of_the_mask():
    """A thread that leaves a stream's context goes back to its current device, which is GPU 0 in a new thread."""
    calls: list[tuple[str, object]] = []

    def noting(name: str) -> Callable[[object], mock.MagicMock]:
        def call(argument: object) -> mock.MagicMock:
            calls.append((name, argument))
            return mock.MagicMock(name=name)

        return call

    cache, device = AsyncPlanCache(1.10, group=SequenceGroup(0, 1)), torch.device("cuda", 3)
    patched = {name: noting(name) for name in ("set_device", "Stream", "stream")}
    with mock.patch.multiple(torch.cuda, **patched):
        for _ in range(2):
            cache._own_stream(device, mock.MagicMock())
    assert calls[:2] == [("set_device", device), ("Stream", device)]
    assert [name for name, _ in calls] == ["set_device", "Stream", "stream", "set_device", "stream"]
