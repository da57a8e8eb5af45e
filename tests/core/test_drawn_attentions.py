"""The distributed oracle: drawn attentions on every UxRy against dense attention in one process, forward and backward.

Layouts, planners, keys, precisions, dtypes, block sizes, token orders, packed sequences and the masks of all sources
are those of `scripts/campaign`, which draws more of them on processes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import pytest

from dbsp_core import Strategy
from scripts.checks.stress.cases import Draw, draw_case
from scripts.checks.stress.oracle import BOUNDS, errors_of
from tests.support.generators import EVERY_STRATEGY

CASES = 8
"""Attentions of each strategy."""


def drawn(strategy: Strategy, first: int) -> Iterator[Draw]:
    """Yields cases for a strategy, every other one with backward if that is possible."""
    for number in itertools.count(1000 * EVERY_STRATEGY.index(strategy) + first):
        case = replace(draw_case(0, number), strategy=str(strategy))
        if case.kernel != "triton":  # slow in the interpreter
            yield replace(case, backward=case.precision == "model" and number % 2 == 0)


@pytest.mark.parametrize("first", [0, pytest.param(500, marks=pytest.mark.long)])
@pytest.mark.parametrize("strategy", EVERY_STRATEGY, ids=str)
def test_equals_dense_attention(threads, strategy, first):
    for case in itertools.islice(drawn(strategy, first), CASES):
        for errors in threads(strategy.world).run(errors_of, case):
            assert all(error <= BOUNDS[case.dtype, kind] for kind, error in errors.items()), (case, errors)
