"""Mistakes are one clear line on every rank, before any collective is entered: nothing hangs."""

from __future__ import annotations

import pytest

from dbsp_core import SequenceGroup, UserError, make_plan
from dbsp_core.comm.consistency import check_consistent
from tests.core.robustness.bad_input_cases import (
    a_mask,
    call,
    call_inside_a_transform,
    call_where_one_rank_differs,
    call_with_another_strategy,
    call_with_other_things,
    call_with_unfit_inputs,
    call_with_wrong_shapes,
    equal_by_process_group,
)
from tests.support.workers import WorkerError

WORLD = 3


def assert_fails_identically(pool, message, function, *args):
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
            "kernel 'sparge' does not support this plan: it returns no log-sum-exp",
        ),
        ({"kernel": "magic"}, "unknown kernel 'magic'; use one of auto"),
        ({"precision": "in8"}, "precision cannot be 'in8': use one of model, int8; did you mean 'int8'?"),
        ({"keys": "neded"}, "keys cannot be 'neded'; use one of all, needed; did you mean 'needed'"),
    ],
)
def test_settings_that_do_not_fit(pool, options, message):
    assert_fails_identically(pool, message, call, options)


def test_shapes_that_do_not_fit_the_mask(pool):
    assert_fails_identically(pool, "the plan has 3 heads", call_with_wrong_shapes)


@pytest.mark.parametrize(
    ("culprit", "fault", "message"),
    [
        (0, "not finite", "rank(s) [{}]: q, k or v has values that are not finite"),
        (1, "other mask", "the mask differs on rank(s) [{}]"),
        (2, "other layout", "the sequence layout differs on rank(s) [{}]"),
        (0, "other scale", "the scale of the scores differs on rank(s) [{}]"),
        (1, "other kernel", "rank(s) [{}] selected a different attention kernel"),
        (2, "other version", "the version of triton differs on rank(s) [{}]; install the same for all ranks"),
        (0, "no debug", "debug differs on rank(s) [{}]"),
        (1, "other shape", "rank(s) [{}]: q, k, v must be [batch, heads, n_local, D] of one shape"),
    ],
)
def test_debug_stops_all_ranks_for_what_one_rank_sees(pool, culprit, fault, message):
    assert_fails_identically(pool, message.format(culprit), call_where_one_rank_differs, culprit, fault)


UNFIT = {
    "forward mode": "carries a forward-mode derivative (torch.autograd.forward_ad)",
    "jvp": "inside a transform of torch.func",
    "grad": "inside a transform of torch.func",
    "vmap": "inside a transform of torch.func",
    "dtype": "q, k, v must be of one dtype, got bfloat16, float32, float32; cast them to one",
    "batch": "hold nothing to attend with",
    "width": "hold nothing to attend with",
}


@pytest.mark.parametrize("where", ["function", "executor", "session"])
@pytest.mark.parametrize("fault", UNFIT)
def test_inputs_that_no_attention_over_ranks_serves(pool, where, fault):
    """On all ranks, or on one, one after another."""
    culprits = [[0, 1, 2], [1]][(len(where) + list(UNFIT).index(fault)) % 2]
    said = UNFIT[fault] if len(culprits) == WORLD else f"rank(s) {culprits}: q, k"
    assert_fails_identically(pool, said, call_with_unfit_inputs, where, fault, culprits)


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("function", "q, k, v are [batch, heads, tokens, D]"),
        ("executor", "this looks like [batch, tokens, heads, D]: transpose(1, 2)"),
        ("session", "this looks like [batch, tokens, heads, D]: transpose(1, 2)"),
    ],
)
def test_heads_and_tokens_in_the_other_order(pool, where, message):
    assert_fails_identically(pool, message, call_with_unfit_inputs, where, "turned", [0, 1, 2])


def test_a_forward_pass_inside_a_transform(pool):
    assert_fails_identically(pool, UNFIT["grad"], call_inside_a_transform)


@pytest.mark.parametrize(
    ("other", "message"),
    [("U1R3", "the strategy differs on rank(s) [1]"), ("U2R1", "rank(s) [1]: strategy U2R1 needs 2·1 = 2 GPUs")],
)
def test_another_strategy_on_one_rank(pool, other, message):
    assert_fails_identically(pool, message, call_with_another_strategy, 1, other)


OTHER_THINGS = {
    "bits": "mask must be a BlockMask, got a Tensor; make one of these bits: BlockMask(bits, BlockGrid.uniform(",
    "array": "mask must be a BlockMask, got a ndarray; make one of these bits",
    "swapped": "mask must be a BlockMask, got a str; the mask comes first, then the strategy",
    "number": "a strategy is needed here, of the form UxRy, for example U4R2 for 8 GPUs; got 3",
    "auto": "of the form UxRy, for example U4R2 for 8 GPUs; 'auto' is a setting of sessions",
}


@pytest.mark.parametrize("what", OTHER_THINGS)
def test_other_things_in_place_of_mask_and_strategy(pool, what):
    assert_fails_identically(pool, OTHER_THINGS[what], call_with_other_things, what, 2)


@pytest.mark.parametrize(
    ("mask", "strategy", "message"),
    [
        (a_mask().bits, "U2R1", OTHER_THINGS["bits"]),
        ("U2R1", a_mask(), OTHER_THINGS["swapped"]),
        (a_mask(), 8, "got 8"),
        (a_mask(), None, "got a NoneType"),
        (a_mask(), " Auto", OTHER_THINGS["auto"]),
        (a_mask(), "3", "strategy '3' is not of the form UxRy"),
    ],
)
def test_a_plan_of_other_things(mask, strategy, message):
    with pytest.raises(UserError) as told:
        make_plan(mask, strategy)
    assert message in str(told.value)


def test_a_process_group_is_taken_in_place_of_ours(pool):
    assert pool(WORLD).run(equal_by_process_group) == [True] * WORLD


@pytest.mark.parametrize(
    ("problem", "has_cause"), [(UserError("cfd is no setting"), False), (ValueError("a bug"), True)]
)
def test_where_a_user_s_mistake_was_found_is_no_cause_of_its_error(problem, has_cause):
    with pytest.raises(Exception, match=str(problem)) as raised:
        check_consistent(SequenceGroup(0, 1), problem, {})
    assert (raised.value.__cause__ is problem) == has_cause
    assert raised.value.__suppress_context__
