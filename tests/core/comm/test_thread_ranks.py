"""Ranks that are threads exchange what processes on gloo do, bitwise, and break off where ranks do not fit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dbsp_core import SequenceGroup
from dbsp_core.utils.errors import UserError
from tests.core.comm import collective_cases as cases
from tests.support.thread_ranks import ThreadRanks
from tests.support.workers import WorkerError

BROKE_OFF = "communication between the ranks of the sequence broke off"


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize(
    "case",
    [
        cases.all_to_alls,
        cases.several_in_flight,
        cases.gathers,
        cases.auxiliary_groups,
        cases.gradients,
        cases.a_sender_waits_alone,
    ],
)
def test_equals_gloo(threads, pool, world, case):
    assert same(threads(world).run(case), pool(world).run(case))


class TestAsynchronous:
    @pytest.mark.parametrize("dtype", cases.DTYPES)
    def test_what_is_received_is_not_there_before_wait(self, threads, dtype):
        for ((received,),) in zip(threads(2).run(cases.read_before_wait, dtype), strict=True):
            if dtype == torch.bool:
                assert received.all()
            elif dtype.is_floating_point:
                assert received.isnan().all()
            else:
                assert (received == torch.iinfo(dtype).max).all()

    def test_what_is_sent_must_not_change_before_wait(self, threads):
        assert raised(threads(2), cases.changed_before_wait) == ["CommunicationError"] * 2


class TestFailures:
    @pytest.mark.parametrize("control", [False, True])
    def test_a_rank_that_raises_releases_the_others(self, threads, control):
        kinds = raised(threads(3), cases.one_raises, 1, control, message="what this rank says")
        assert kinds == ["CommunicationError", "LookupError", "CommunicationError"]

    def test_a_rank_that_was_answered_goes_on(self, threads):
        with pytest.raises(WorkerError) as caught:
            threads(3).run(cases.one_raises_after_the_others_were_answered, 1)
        assert caught.value.errors == [(1, "LookupError", "what this rank says")]

    @pytest.mark.parametrize("control", [False, True])
    def test_a_rank_that_never_comes_is_told_of(self, control):
        kinds = raised(ThreadRanks(3, patience_s=0.5), cases.one_never_comes, 2, control, message="rank 2 has")
        assert kinds[:2] == ["CommunicationError"] * 2

    def test_another_order_pairs_nothing(self, threads):
        kinds = raised(threads(3), cases.other_order, 1, message="call 0: rank")
        assert kinds == ["CommunicationError"] * 3

    @pytest.mark.parametrize("what", ["shape", "dtype", "method", "splits"])
    def test_calls_of_another_kind_pair_nothing(self, threads, what):
        message = "was sent where" if what == "splits" else "call 0: rank"
        assert set(raised(threads(3), cases.other_kind, 1, what, message=message)) == {"CommunicationError"}

    def test_a_call_that_nobody_waits_for_is_found(self, threads):
        assert raised(threads(2), cases.one_starts_more, 0, message="1 calls") == ["Unequal"] * 2

    def test_a_group_ends_with_its_ranks(self, threads):
        for group in threads(2).run(cases.group_after_its_ranks):
            with pytest.raises(UserError, match="is destroyed"):
                group.all_gather(torch.zeros(1))
        assert SequenceGroup.from_group() == SequenceGroup(0, 1)


def raised(ranks: ThreadRanks, case: Any, *args: Any, message: str = "") -> list[str]:
    """By rank, what kinds of error the ranks raise, of which one has this message."""
    with pytest.raises(WorkerError) as caught:
        ranks.run(case, *args)
    assert any(message in text for _, _, text in caught.value.errors), caught.value.errors
    assert all(text.startswith(BROKE_OFF) for _, kind, text in caught.value.errors if kind == "CommunicationError")
    return [kind for _, kind, _ in caught.value.errors]
