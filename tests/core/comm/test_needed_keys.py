"""Each rank is sent the keys that its rows need, and no others: exact for every UxRy on 2 to 8 ranks."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from dbsp_core import Strategy
from tests.core.runtime.gradients.gradient_cases import run_gradients
from tests.support.attention_cases import Case, run_case, run_case_apart

WORLDS = (2, 3, 4, 6, 8)
TOLERANCE = 1e-5

# Heads that x does not divide and are split, short blocks, empty rows and columns, text, batches, orders per head.
SHAPES = (
    Case("-", heads=3, tokens=203, density=0.15),
    Case("-", heads=5, tokens=331, block_q=32, text_tokens=37, batch=2, density=0.1),
    Case("-", heads=1, tokens=611, block_q=32, block_k=64, density=0.7),
    Case("-", heads=6, tokens=19 + 5 * 8 * 9, text_tokens=19, thw=(5, 8, 9), block_q=32, block_k=32, density=0.2,
         orders=("thw", "hwt", "wth", "hwt", "tile:3x4x4", "twh")),
)  # fmt: skip
SETTINGS = (
    {"planner": "local", "layout": "local", "padded": True},
    {"planner": "dbsp", "layout": "striped", "streams": "first", "padded": True},
    {"planner": "contiguous"},
    {"planner": "random", "layout": "learned"},
)
CHUNKS = (
    {"chunk_shares": (1,)},
    {"chunk_shares": (3, 2, 1)},
    {"chunk_shares": (1, 1, 1, 1)},
    {"chunk_shares": (2, 1), "one_ahead": True},
    {"chunk_shares": (1, 1, 1, 1), "one_ahead": True},
)


def cases_for(strategy: Strategy) -> list[Case]:
    ways = enumerate(itertools.product(SHAPES, SETTINGS))
    every = (
        replace(
            shape, strategy=str(strategy), keys="needed", seed=seed, band=bool(seed % 3), **how, **CHUNKS[seed % 5]
        )
        for seed, (shape, how) in ways
    )
    return [case for case in every if strategy.ring <= -(-case.tokens // case.block_k)]


@pytest.mark.parametrize(("world", "strategy"), [(w, s) for w in WORLDS for s in Strategy.all_for(w)], ids=str)
def test_equals_dense_attention(threads, world, strategy):
    for case in cases_for(strategy):
        errors = threads(world).run(run_case, case)
        assert all(error <= TOLERANCE for error in errors), (case, errors)


@pytest.mark.parametrize("world", WORLDS)
def test_processes_equal_dense_attention(pool, world):
    """Each strategy with other cases, so that every planner and way to send in chunks is among them."""
    for row, strategy in enumerate(Strategy.all_for(world)):
        for case in cases_for(strategy)[row::7]:
            errors = pool(world).run(run_case_apart, case)
            assert all(error <= TOLERANCE for error in errors), (case, errors)


@pytest.mark.parametrize(("world", "strategy"), [(w, s) for w in (2, 4, 6) for s in Strategy.all_for(w)], ids=str)
def test_gradients_equal_those_of_dense_attention(threads, world, strategy):
    for case in cases_for(strategy)[world % 2 :: 2]:
        errors = threads(world).run(run_gradients, case)
        assert all(max(error) <= TOLERANCE for error in errors), (case, errors)


@pytest.mark.parametrize(
    ("world", "strategy", "shares"), [(2, "U1R2", (1,)), (4, "U4R1", (1,)), (6, "U2R3", (3, 2, 1))]
)
def test_a_needed_block_left_out_does_not_pass(threads, world, strategy, shares):
    case = Case(
        strategy, "local", heads=5, tokens=128 * world, keys="needed", layout="local", band=True, chunk_shares=shares
    )
    assert all(e <= TOLERANCE for e in threads(world).run(run_case, case))
    assert max(threads(world).run(run_case, replace(case, sabotage="a needed block left out"))) > 100 * TOLERANCE
