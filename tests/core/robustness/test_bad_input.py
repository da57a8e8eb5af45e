"""Mistakes are one clear line on every rank, before any collective is entered: nothing hangs."""

from __future__ import annotations

import pytest

from bad_input_cases import call, call_where_one_rank_differs, call_with_wrong_shapes
from workers import WorkerError

WORLD = 3


def assert_fails_alike(pool, message, function, *args):
    workers = pool(WORLD)
    with pytest.raises(WorkerError) as caught:
        workers.run(function, *args)
    assert [rank for rank, _, _ in caught.value.errors] == list(range(WORLD))
    for _, kind, text in caught.value.errors:
        assert kind in ("UserError", "SettingError")
        assert message in text
        assert "\n" not in text
    workers.run(call, {})  # the workers are not out of step


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"strategy": "U2R2"}, "strategy U2R2 needs 2·2 = 4 GPUs but there are 3; use one of U3R1, U1R3"),
        ({"strategy": "3"}, "not of the form UxRy"),
        ({"planner": "magic"}, "unknown planner 'magic'; use one of"),
        (
            {"kernel": "sparge", "strategy": "U1R3"},
            "kernel 'sparge' cannot serve this plan: it returns no log-sum-exp",
        ),
        ({"kernel": "magic"}, "unknown kernel 'magic'; use auto or one of"),
        ({"reward": -1.0}, "must not be negative"),
    ],
)
def test_settings_that_do_not_fit(pool, options, message):
    assert_fails_alike(pool, message, call, options)


def test_shapes_that_do_not_fit_the_mask(pool):
    assert_fails_alike(pool, "the plan has 3 heads", call_with_wrong_shapes)


@pytest.mark.parametrize("culprit", range(WORLD))
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("not finite", "rank(s) [{}]: q, k or v has values that are not finite"),
        ("other mask", "the mask differs on rank(s) [{}]"),
        ("other layout", "the sequence layout differs on rank(s) [{}]"),
        ("other scale", "the scale of the scores differs on rank(s) [{}]"),
        ("other kernel", "another kernel serves on rank(s) [{}]"),
        ("other version", "the version of triton differs on rank(s) [{}]; install the same for all ranks"),
        ("no debug", "debug differs on rank(s) [{}]"),
        ("other shape", "rank(s) [{}]: q, k, v must be [batch, heads, n_local, D] of one shape"),
    ],
)
def test_debug_stops_all_ranks_for_what_one_rank_sees(pool, culprit, fault, message):
    assert_fails_alike(pool, message.format(culprit), call_where_one_rank_differs, culprit, fault)
