"""How fast a run's steps go, and what is left."""

from __future__ import annotations

import pytest
from rich.progress import Progress

from dbsp_cli.generate.pace import Pace, PaceColumn


class Clock:
    seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


@pytest.fixture
def clock():
    return Clock()


def test_the_first_step_counts_until_there_is_a_second(clock):
    pace = Pace(5, clock)
    assert (pace.seconds, pace.left) == (None, None)
    pace.step(0)
    assert (pace.seconds, pace.left) == (None, None)
    clock.seconds += 40  # it compiles
    pace.step(1)
    assert (pace.seconds, pace.left) == (40, 160)
    clock.seconds += 6
    pace.step(2)
    assert (pace.seconds, pace.left) == (6, 18)
    clock.seconds += 4
    assert pace.left == 14
    pace.step(2)  # drawn again
    assert (pace.seconds, pace.left) == (6, 14)
    clock.seconds += 100
    assert pace.left == 0
    pace.step(5)
    assert (pace.seconds, pace.left) == (27.5, None)


def test_the_column_says_seconds_a_step_and_what_is_left(clock):
    pace = Pace(100, clock)
    column, task = PaceColumn(pace), Progress().tasks
    assert column.render(task).plain == ""
    for done in range(3):
        pace.step(done)
        clock.seconds += 62.5
    clock.seconds -= 62.5
    assert column.render(task).plain == "62.5 s/step, 1:42:05 left"
    pace.steps = 3
    assert column.render(task).plain == "62.5 s/step, 1:02 left"
    pace.steps = 2
    assert column.render(task).plain == "62.5 s/step"
