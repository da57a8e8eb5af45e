"""Which mask an attention gets: dense ends, steps and branches told from timesteps, errors on all ranks together."""

from __future__ import annotations

import pytest

from dbsp_core import SequenceGroup
from dbsp_core.comm.consistency import run_consistently
from dbsp_core.config import DbspConfig
from dbsp_core.masks.steps import MOST_PASSES, DenoisingStep, DenseSchedule, Progress, StepClock
from tests.core.runtime.mask_provider_cases import OddOneOut, attend_in_two_steps, attend_with, dense_moments
from tests.support.workers import WorkerError


@pytest.mark.parametrize(("world", "odd"), [(2, 1), (3, 0), (3, 2)])
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("grid", "the file is broken here"),
        ("mask", "the file is broken here"),
        ("heads", "the mask source gave"),
        ("bug", "KeyError: 'layer 7'"),
        ("bits", "the mask of layer 0 differs on rank(s)"),
    ],
)
def test_a_fault_on_one_rank_raises_on_all(pool, world, odd, fault, message):
    with pytest.raises(WorkerError) as raised:
        pool(world).run(attend_with, OddOneOut(16, 16, rank=odd, fault=fault))
    errors = raised.value.errors
    assert [rank for rank, *_ in errors] == list(range(world))
    expected = "ValueError" if fault == "bug" else "UserError"  # a fault that is not the user's is raised as such
    assert all(kind == expected and message in text for _, kind, text in errors), errors
    if fault != "bits":
        assert all(f"rank(s) [{odd}]" in text for *_, text in errors)


def test_without_faults_it_runs(pool):
    pool(3).run(attend_with, OddOneOut(16, 16, fault="none"))


def test_alone_a_problem_is_told_as_it_is():
    def fail() -> None:
        raise ValueError("ρ_s is not a number")

    with pytest.raises(ValueError, match=r"^ρ_s is not a number$"):
        run_consistently(SequenceGroup(0, 1), fail)


class _Host:
    """A host whose scheduler has an index or none."""

    def __init__(self) -> None:
        self.index: int | None = None
        self.clock = StepClock(lambda: Progress(step_index=self.index))

    def advance(self, timestep, cfg_branch=None, index=None) -> DenoisingStep:
        self.index = index
        return self.clock.advance(timestep, cfg_branch)


def test_steps_and_branches_are_told_from_timesteps():
    host = _Host()
    moments = [host.advance(t) for t in (999, 999, 800, 800, 5, 5, 999, 999, 800)]
    assert moments == [
        DenoisingStep(s, b) for s, b in ((0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1), (0, 0), (0, 1), (1, 0))
    ]


@pytest.mark.parametrize("index", [None, 0], ids=["timesteps", "index"])
def test_generations_of_one_step_begin_with_the_first_guidance_pass_again(index):
    host = _Host()
    moments = [host.advance(999.0, index=index) for _ in range(2 * MOST_PASSES)]
    assert moments == [DenoisingStep(0, branch) for branch in range(MOST_PASSES)] * 2


def test_where_the_host_says_the_step_no_timestep_is_read():
    host = _Host()

    def unread() -> float:
        raise AssertionError("a timestep on a GPU would be waited for")

    # A scheduler has no index until its first step is over; and none again once its timesteps are set anew.
    passes = [(999.0, None), (999.0, None), (unread, 1), (unread, 1), (unread, 2), (999.0, None), (unread, 1)]
    moments = [host.advance(timestep, index=index) for timestep, index in passes]
    assert moments == [DenoisingStep(*one) for one in ((0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (0, 0), (1, 0))]


def test_a_step_is_counted_from_where_a_generation_begins():
    for first in (None, 6):  # with `strength` below 1, a scheduler begins at another index than 0
        host = _Host()
        indices = [first, first, 7, 7, 8, 8, 9, 9, 7]
        moments = [host.advance(5.0, cfg_branch=number % 2, index=index) for number, index in enumerate(indices)]
        assert [moment.step for moment in moments] == [0, 0, 1, 1, 2, 2, 3, 3, 0]


def test_a_generation_that_failed_at_its_first_step_is_not_counted_on():
    now = Progress("first")
    clock = StepClock(lambda: now)
    assert [clock.advance(t).step for t in (999, 800)] == [0, 1]
    now = Progress("second", 4)
    assert [clock.advance(800).step for _ in range(2)] == [0, 0]


def test_where_the_host_says_the_guidance_pass_a_timestep_may_repeat():
    host = _Host()
    passes = [(999, 0), (999, 1), (800, 0), (800, 1), (800, 0), (800, 1), (5, 0), (5, 0), (5, 1), (999, 1), (800, 1)]
    moments = [host.advance(*now) for now in passes]
    expected = [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1), (3, 0), (4, 0), (4, 1), (0, 1), (1, 1)]
    assert moments == [DenoisingStep(*moment) for moment in expected]


@pytest.mark.parametrize("odd", [0, 2])
def test_a_source_that_cannot_name_its_mask_on_one_rank_stops_all(pool, odd):
    with pytest.raises(WorkerError) as raised:
        pool(3).run(attend_in_two_steps, odd)
    errors = raised.value.errors
    assert [rank for rank, *_ in errors] == [0, 1, 2]
    assert all(
        (kind, text) == ("ValueError", f"rank(s) [{odd}]: the table of contents is gone") for _, kind, text in errors
    )


def test_dense_ends():
    schedule = DenseSchedule(first_steps=1, last_steps=1, first_layers=1, last_layers=2)
    everything, ends = [0, 1, 2, 3, 4], [0, 3, 4]
    moments = dense_moments(schedule, 5, [900, 900, 600, 600, 300, 300, 0, 0, 900, 600], steps=4)
    assert moments == [everything, everything, ends, ends, ends, ends, everything, everything, everything, ends]


def test_without_dense_ends_nothing_is_dense():
    assert dense_moments(DenseSchedule(), 3, [900, 0], steps=2) == [[], []]


def test_last_steps_need_the_number_of_steps():
    with pytest.raises(ValueError, match="attach db-SP to the pipeline"):
        DenseSchedule(last_steps=1).is_dense(0, 4, 3, None)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"first_steps": -1}, "dense_schedule.first_steps=-1"),
        ({"fist_steps": 1}, "did you mean 'first_steps'"),
        ({"first_steps": 1.5}, "must be int"),
        (3, "a mapping of first_steps"),
    ],
)
def test_schedules_that_make_no_sense_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        DbspConfig.load({"dense_schedule": settings})
