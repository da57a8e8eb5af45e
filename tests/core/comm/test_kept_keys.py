"""Ranks keep an earlier mask's keys, and get what another mask adds: exact for every UxRy on 2 to 8 ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dbsp_core import Strategy
from tests.core.comm.oracle_cases import TOLERANCE, WORLDS, chunked_key_cases
from tests.core.runtime.gradients.gradient_cases import run_gradients
from tests.support.attention_cases import Case, run_case


@pytest.mark.parametrize(("world", "strategy"), [(w, s) for w in WORLDS for s in Strategy.all_for(w)], ids=str)
def test_equals_dense_attention(threads, world, strategy):
    for case in chunked_key_cases(strategy, "kept")[(world + strategy.ring) % 6 :: 7]:
        errors = threads(world).run(run_case, case)
        assert all(error <= TOLERANCE for error in errors), (case, errors)


@pytest.mark.parametrize(("world", "strategy"), [(w, s) for w in (2, 4, 6) for s in Strategy.all_for(w)], ids=str)
def test_gradients_equal_those_of_dense_attention(threads, world, strategy):
    for case in chunked_key_cases(strategy, "kept")[(world + strategy.ulysses) % 6 :: 7]:
        errors = threads(world).run(run_gradients, case)
        assert all(max(error) <= TOLERANCE for error in errors), (case, errors)


@pytest.mark.parametrize(("world", "strategy"), [(2, "U1R2"), (4, "U2R2"), (4, "U4R1")])
def test_added_keys_left_out_do_not_pass(threads, world, strategy):
    case = Case(strategy, heads=5, tokens=128 * world, keys="kept", layout="striped", seed=2)
    assert all(e <= TOLERANCE for e in threads(world).run(run_case, case))
    assert max(threads(world).run(run_case, replace(case, sabotage="nothing added"))) > 100 * TOLERANCE
