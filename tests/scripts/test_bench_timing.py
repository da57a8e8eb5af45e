"""Timing of benchmarks: quiet repetitions are distinguished, and ranks that fail are reported."""

from __future__ import annotations

import pytest

from scripts.bench.attention import Comparison, core_seconds
from scripts.bench.timing import Timer, run_ranks, undisturbed_samples
from tests.scripts.failing_ranks import die_on_one, fail_on_one

BUSY = [[(1.0, 0.0, 0.9), (9.0, 8.0, 0.9), (1.2, 0.01, 1.0)], [(1.1, 0.0, 0.8), (8.0, 0.0, 0.8), (1.0, 0.04, 0.7)]]
"""Samples of two ranks, the first of which lost its core in the second repetition."""


class TestClock:
    def test_repetitions_in_which_a_rank_lost_its_core_are_left_out(self):
        many = [one[:1] * 3 + one for one in BUSY]
        assert undisturbed_samples(many).tolist() == [1.1, 1.1, 1.1, 1.1, 1.2]

    def test_the_three_most_quiet_stand_where_there_are_fewer(self):
        assert sorted(undisturbed_samples(BUSY)) == [1.1, 1.2, 9.0]

    def test_seconds_on_a_core_are_the_busiest_ranks(self):
        assert core_seconds(BUSY) == 0.9

    def test_every_repetition_is_a_sample_and_warming_up_is_not(self):
        calls = []
        samples = Timer("cpu").samples(lambda: calls.append(1), repeats=4, warm_up=2)
        assert (len(samples), len(calls)) == (4, 6)
        assert all(seconds > 0 and waited >= 0 for seconds, waited, _ in samples)


class TestComparison:
    def test_the_speed_up_is_set_against_the_ratio_of_imbalances(self):
        one = Comparison(
            "U2R1", rho_before=1.5, rho=1.2, seconds_before=3.0, seconds=2.0, core_seconds_before=3.0, core_seconds=1.5
        )
        assert (one.speedup, one.expected, one.reached) == (1.5, 1.25, 1.2)
        record = one.record()
        assert {"strategy", "rho_before", "rho", "seconds_before", "seconds", "speedup"} <= set(record)


@pytest.mark.parametrize(
    ("function", "complaint"), [(fail_on_one, "the second rank's own fault"), (die_on_one, "rank 1 ended")]
)
def test_a_rank_that_fails_or_dies_is_reported(function, complaint):
    with pytest.raises(RuntimeError, match=complaint):
        run_ranks(function, 2, "cpu")
