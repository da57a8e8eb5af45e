"""One slice of every oracle on processes and gloo: each strategy with a few cases, and among them every planner.

In one file, so that the workers of a world size are started once.
"""

from __future__ import annotations

import pytest

from dbsp_core import Strategy
from tests.core.comm.oracle_cases import TOLERANCE, key_cases, plain_cases
from tests.core.runtime.gradients import gradient_cases
from tests.core.sequences import packed_cases
from tests.support.attention_cases import run_case_apart

MET = (2, 3, 4, 6, 8)


@pytest.mark.parametrize("world", MET)
def test_attention(pool, world):
    for row, strategy in enumerate(Strategy.all_for(world)):
        for case in plain_cases(strategy)[row::4] + key_cases(strategy, "needed")[row::4]:
            errors = pool(world).run(run_case_apart, case)
            assert all(error <= TOLERANCE for error in errors), (case, errors)


@pytest.mark.parametrize("world", MET)
def test_gradients(pool, world):
    for row, strategy in enumerate(Strategy.all_for(world)):
        case, tolerance = gradient_cases.cases_for(strategy)[(row + world) % 4]
        errors = pool(world).run(gradient_cases.run_gradients, case)
        assert all(max(error) <= tolerance for error in errors), (case, errors)


@pytest.mark.parametrize("world", MET[:-1])
def test_packed_sequences(pool, world):
    ways = enumerate(Strategy.all_for(world))
    cases = [packed_cases.cases_for(strategy)[row] for row, strategy in ways]
    for case, *errors in zip(cases, *pool(world).run(packed_cases.run_packed, cases), strict=True):
        assert max(map(max, errors)) <= case.tolerance, (case, errors)
