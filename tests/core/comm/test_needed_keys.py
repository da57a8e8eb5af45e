"""Each rank is sent the keys that its rows need, and no others: exact for every UxRy on 2 to 8 ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dbsp_core import Strategy
from tests.core.comm.oracle_cases import TOLERANCE, WORLDS, key_cases
from tests.core.runtime.gradients.gradient_cases import run_gradients
from tests.support.attention_cases import Case, run_case


@pytest.mark.parametrize(("world", "strategy"), [(w, s) for w in WORLDS for s in Strategy.all_for(w)], ids=str)
def test_equals_dense_attention(threads, world, strategy):
    for case in key_cases(strategy, "needed"):
        errors = threads(world).run(run_case, case)
        assert all(error <= TOLERANCE for error in errors), (case, errors)


@pytest.mark.parametrize(("world", "strategy"), [(w, s) for w in (2, 4, 6) for s in Strategy.all_for(w)], ids=str)
def test_gradients_equal_those_of_dense_attention(threads, world, strategy):
    for case in key_cases(strategy, "needed")[world % 2 :: 2]:
        errors = threads(world).run(run_gradients, case)
        assert all(max(error) <= TOLERANCE for error in errors), (case, errors)


@pytest.mark.parametrize(("world", "strategy"), [(2, "U1R2"), (4, "U4R1"), (6, "U2R3")])
def test_a_needed_block_left_out_does_not_pass(threads, world, strategy):
    case = Case(strategy, "dbsp", heads=5, tokens=128 * world, keys="needed", band=True)
    assert all(e <= TOLERANCE for e in threads(world).run(run_case, case))
    assert max(threads(world).run(run_case, replace(case, sabotage="a needed block left out"))) > 100 * TOLERANCE
