"""The distributed oracle: every UxRy on 1 to 8 ranks against dense attention in one process.

Ranks are threads, except where the Triton kernel is interpreted; see test_oracle_on_processes for the rest.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from dbsp_core import Strategy
from tests.core.comm.oracle_cases import TOLERANCE, WORLDS, every_case
from tests.support.attention_cases import Case, run_case, run_case_apart


@pytest.mark.parametrize(("world", "strategy"), [(w, s) for w in WORLDS for s in Strategy.all_for(w)], ids=str)
def test_equals_dense_attention(threads, world, strategy):
    for case in every_case(strategy):
        errors = threads(world).run(run_case, case)
        assert all(error <= TOLERANCE for error in errors), (case, errors)


@pytest.mark.parametrize(("world", "strategy"), [(4, "U2R2"), (6, "U2R3"), (8, "U1R8")])
def test_peers_equal_dense_attention(threads, world, strategy):
    case = Case(strategy, "snake", heads=5, tokens=700, text_tokens=21, block_q=32, block_k=32)
    errors = threads(world).run(run_case, case)
    assert all(error <= TOLERANCE for error in errors), (case, errors)


# Orders of all heads alike, and orders of their own: a block then holds other tokens in other heads.
ORDERED = (
    Case("-", heads=3, tokens=5 + 7 * 6 * 8, text_tokens=5, thw=(7, 6, 8), orders=("hwt",), block_k=32),
    Case("-", heads=2, tokens=6 * 6 * 9, thw=(6, 6, 9), orders=("tile:2x4x4",), batch=2),
    Case("-", heads=6, tokens=19 + 5 * 8 * 9, text_tokens=19, thw=(5, 8, 9), block_q=32,
         orders=("thw", "hwt", "wth", "hwt", "tile:3x4x4", "twh")),
)  # fmt: skip


@pytest.mark.parametrize(
    "world", [pytest.param(world, marks=pytest.mark.long) if world == 8 else world for world in WORLDS]
)
def test_token_orders_equal_dense_attention(threads, world):
    ways = itertools.product(Strategy.all_for(world), ORDERED, ("contiguous", "paper", "dbsp", "random"))
    for seed, (strategy, shape, planner) in enumerate(ways):
        layout = ("contiguous", "striped")[seed % 2]
        case = replace(
            shape,
            strategy=str(strategy),
            planner=planner,
            layout=layout,
            streams="first" if seed % 2 else None,
            padded=True,
            seed=seed,
        )
        errors = threads(world).run(run_case, case)
        assert all(error <= TOLERANCE for error in errors), (case, errors)


@pytest.mark.parametrize("strategy", ["U2R2", "U1R4"])
@pytest.mark.parametrize("kernel", ["cpu", "reference"])
def test_float64_is_kept_to_its_last_digits(threads, strategy, kernel):
    """Also where chunks are merged: by a log-sum-exp in float32 they would differ by 1e-7."""
    case = Case(strategy, batch=2, text_tokens=21, kernel=kernel, dtype=torch.float64)
    assert all(error <= 1e-13 for error in threads(4).run(run_case, case))


@pytest.mark.parametrize(("world", "strategy"), [(2, "U2R1"), (3, "U1R3"), (4, "U2R2")])
def test_the_triton_kernel_equals_dense_attention(pool, world, strategy):
    """In Triton's interpreter, and on rings with results that accumulate."""
    pytest.importorskip("triton")
    case = Case(strategy, "dbsp", heads=3, tokens=104, text_tokens=21, batch=2, kernel="triton", seed=world)
    assert all(error <= TOLERANCE for error in pool(world).run(run_case_apart, case))


@pytest.mark.parametrize(
    ("sabotage", "world", "strategy"),
    [
        ("local tokens only", 2, "U2R1"),
        ("wrong order of chunks", 3, "U1R3"),
        ("wrong order of chunks", 8, "U2R4"),
        ("wrong scale", 4, "U2R2"),
        ("token order off by one", 4, "U4R1"),
        ("token order off by one", 4, "U1R4"),
        ("heads' orders mixed up", 4, "U2R2"),
    ],
)
def test_negative_controls_fail(threads, sabotage, world, strategy):
    # Equal chunks, so that a wrong order gives wrong numbers and not merely wrong shapes.
    orders = ("thw", "hwt", "wht", "twh") if "orders" in sabotage else ("thw",)
    case = Case(
        strategy, "contiguous", heads=4, tokens=128 * world, thw=(2 * world, 8, 8), orders=orders, sabotage=sabotage
    )
    assert all(e <= TOLERANCE for e in threads(world).run(run_case, replace(case, sabotage=None)))
    assert max(threads(world).run(run_case, case)) > 100 * TOLERANCE
