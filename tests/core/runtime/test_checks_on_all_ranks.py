"""What one rank alone cannot have is rejected on all ranks at once, so that none waits for another."""

from __future__ import annotations

import pytest
import torch

from tests.core.runtime.check_cases import rejected_attention, rejected_engine, rejected_later, rejected_session


def assert_rejected(answers, where, reason):
    assert [answer[0] for answer in answers] == [where] * len(answers)
    for _, message in answers:
        assert reason in message


@pytest.mark.parametrize("strategy", [{}, {"strategy": "U1R2"}, {"strategy": "auto"}], ids=str)
def test_unknown_kernel_on_one_rank_is_rejected_when_the_session_is_made(pool, strategy):
    answers = pool(2).run(rejected_session, strategy, "nonsense")
    assert_rejected(answers, "making", "rank(s) [1]: unknown DBSP_KERNEL 'nonsense'")


@pytest.mark.parametrize("strategy", [{}, {"strategy": "U1R2"}, {"strategy": "auto"}], ids=str)
def test_kernel_that_one_rank_lacks_is_rejected_at_the_first_attention(pool, strategy):
    answers = pool(2).run(rejected_session, strategy, "fa4")
    assert_rejected(answers, "attention", "rank(s) [1]: kernel 'fa4' cannot be used here")


def test_ranks_that_would_choose_among_other_strategies_are_rejected(pool):
    answers = pool(2).run(rejected_session, {"strategy": "auto"}, "sparge")
    assert_rejected(answers, "making", "kernel")


@pytest.mark.parametrize("kernel", ["fa4", "sparge"])
def test_named_kernel_with_strategy_auto_is_rejected_on_every_rank(pool, kernel):
    answers = pool(2).run(rejected_session, {"strategy": "auto", "kernel": kernel}, "")
    assert_rejected(answers, "attention", f"kernel '{kernel}' cannot be used here")


@pytest.mark.parametrize("run", [rejected_later, rejected_attention])
def test_kernel_rejected_for_another_dtype_is_rejected_on_every_rank(pool, run):
    answers = pool(2).run(run, torch.float64)
    assert_rejected(answers, "torch.float64", "rank(s) [1]: kernel 'cpu' cannot be used here: it is broken here")


def test_configuration_that_one_rank_of_an_engine_cannot_read(pool, tmp_path):
    answers = pool(2).run(rejected_engine, str(tmp_path / "none.yaml"))
    assert all("rank(s) [1]" in answer for answer in answers)
