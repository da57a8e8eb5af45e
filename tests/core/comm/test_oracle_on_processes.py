"""A part of every oracle on processes and gloo: each strategy with a case of each kind, among them every planner.

One file holds them, so that the workers of a world size are started once.
"""

from __future__ import annotations

import pytest

from dbsp_core import Strategy
from tests.core.comm.oracle_cases import TOLERANCE, key_cases, plain_cases
from tests.core.runtime.gradients import gradient_cases
from tests.core.sequences import packed_cases
from tests.support.attention_cases import run_case_apart

WORLDS = (2, 3, 4, pytest.param(8, marks=pytest.mark.long))


@pytest.mark.parametrize("world", WORLDS)
def test_attention_on_processes_equals_the_oracle(pool, world):
    for row, strategy in enumerate(Strategy.all_for(world)):
        for case in plain_cases(strategy)[row], key_cases(strategy)[row]:
            errors = pool(world).run(run_case_apart, case)
            assert all(error <= TOLERANCE for error in errors), (case, errors)


@pytest.mark.parametrize("world", WORLDS)
def test_gradients_on_processes_equal_the_oracle(pool, world):
    for row, strategy in enumerate(Strategy.all_for(world)):
        case, tolerance = gradient_cases.cases_for(strategy)[(row + world) % 4]
        errors = pool(world).run(gradient_cases.run_gradients, case)
        assert all(max(error) <= tolerance for error in errors), (case, errors)


@pytest.mark.parametrize("world", WORLDS[:-1])
def test_packed_sequences_on_processes_equal_the_oracle(pool, world):
    cases = [packed_cases.cases_for(strategy)[row] for row, strategy in enumerate(Strategy.all_for(world))]
    for case, *errors in zip(cases, *pool(world).run(packed_cases.run_packed, cases), strict=True):
        assert max(map(max, errors)) <= case.tolerance, (case, errors)
