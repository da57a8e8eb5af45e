"""The distributed oracle: drawn attentions on every UxRy against dense attention in one process, forward and backward.

Layouts, planners, keys, precisions, dtypes, block sizes, token orders, packed sequences and the masks of all sources
are those of `scripts/campaign`, which draws more of them on processes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F

from dbsp_core import BlockGrid, BlockMask, Strategy, dual_balanced_attention
from dbsp_core.runtime import chunk_attention
from dbsp_core.runtime.backward import LocalGradients
from scripts.checks.stress.cases import Draw, DrawnSequence, draw_case
from scripts.checks.stress.oracle import BOUNDS, errors_of
from tests.support.generators import EVERY_STRATEGY

CASES = 5
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


@pytest.mark.parametrize("strategy", ["U1R2", "U3R1", "U2R2"])
def test_processes_equal_dense_attention(pool, strategy):
    for case in itertools.islice(drawn(Strategy.parse(strategy), 0), 3):
        for errors in pool(case.world).run(errors_of, case):
            assert all(error <= BOUNDS[case.dtype, kind] for kind, error in errors.items()), (case, errors)


PLAIN = Draw(
    "U2R3", "contiguous", heads=4, density=0.4, sequences=(DrawnSequence((12, 4, 4), 0, "random"),), backward=True
)
"""Chunks are equal, so that a wrong order of them gives wrong numbers and not merely wrong shapes."""


@pytest.mark.parametrize("strategy", ["U16R1", "U4R4"])
def test_sixteen_ranks_equal_dense_attention(threads, strategy):
    case = replace(PLAIN, strategy=strategy, planner="dbsp", heads=12, backward=False)
    assert max(max(errors.values()) for errors in threads(16).run(errors_of, case)) <= 1e-5


def another_lse(*args, attend=chunk_attention._attend, **kwargs):
    out, lse = attend(*args, **kwargs)
    return out, lse + 0.1


@pytest.mark.parametrize(
    ("sabotage", "scale"),
    [(None, 1.0), (None, 1.01), ("wrong order of chunks", 1.0), ("token order off by one", 1.0)],
)
def test_negative_controls_fail(threads, sabotage, scale):
    errors = threads(6).run(errors_of, replace(PLAIN, sabotage=sabotage), scale)
    assert (max(error["output"] for error in errors) > 1e-3) == ((sabotage, scale) != (None, 1.0))


@pytest.mark.parametrize(
    ("strategy", "fault"),
    [
        ("U2R2", patch.object(LocalGradients, "add_chunk")),  # chunks do not return
        ("U4R1", patch.object(chunk_attention, "_attend", another_lse)),
    ],
)
def test_negative_controls_of_gradients_fail(threads, strategy, fault):
    with fault:
        errors = threads(4).run(errors_of, replace(PLAIN, strategy=strategy))
    assert max(error["gradients"] for error in errors) > 1e-3
    assert max(error["output"] for error in errors) <= 1e-5, "the forward is right"


def error_in_bfloat16(rank: int, world: int, strategy: str) -> float:
    """Returns the error of this rank's tokens, over that of rounding the exact output to bfloat16."""
    grid, generator = BlockGrid(64 * world, 0, 16, 16), torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 1, 8, grid.tokens, 16, generator=generator).bfloat16()
    exact = F.scaled_dot_product_attention(q.double(), k.double(), v.double())
    here = slice(64 * rank, 64 * (rank + 1))
    local = (one[:, :, here] for one in (q, k, v))
    found = dual_balanced_attention(*local, BlockMask.dense(8, grid), strategy, planner="contiguous")
    rounded = (exact.bfloat16().double() - exact)[:, :, here].norm()
    return float((found.double() - exact[:, :, here]).norm() / rounded)


def test_chunks_are_merged_in_float32(threads):
    """Expects bfloat16 outputs of a ring to be rounded once, not once a chunk."""
    assert max(threads(8).run(error_in_bfloat16, "U1R8")) < 2  # 1.6; rounded once a chunk: 2.5
