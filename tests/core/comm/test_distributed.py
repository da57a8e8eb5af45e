"""Distributed attention on processes and on 16 ranks, and faults that must be seen; see test_drawn_attentions.py."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from dbsp_core import BlockGrid, BlockMask, Strategy, dual_balanced_attention
from tests.support.attention_cases import Case, run_case

TOLERANCE = 1e-5


@pytest.mark.parametrize("strategy", ["U1R2", "U3R1", "U2R2"])
def test_attention_on_processes_equals_dense_attention(pool, strategy):
    case = Case(strategy, heads=5, tokens=331, block_q=32, text_tokens=37, batch=2, keys="needed", padded=True)
    assert max(pool(Strategy.parse(strategy).world).run(run_case, case)) <= TOLERANCE


SIXTEEN = Case("-", heads=12, tokens=523, text_tokens=5, head_dim=8, density=0.2, keys="needed", band=True)
"""Heads of Wan2.1-1.3B, which 16 ranks do not divide."""


@pytest.mark.parametrize("strategy", ["U16R1", "U4R4"])
def test_sixteen_ranks_equal_dense_attention(threads, strategy):
    assert max(threads(16).run(run_case, replace(SIXTEEN, strategy=strategy))) <= TOLERANCE


@pytest.mark.parametrize(
    ("sabotage", "world", "strategy"),
    [
        ("local tokens only", 2, "U2R1"),
        ("wrong order of chunks", 6, "U2R3"),
        ("wrong scale", 4, "U2R2"),
        ("token order off by one", 4, "U1R4"),
    ],
)
def test_negative_controls_fail(threads, sabotage, world, strategy):
    """Has equal chunks, so that a wrong order gives wrong numbers and not merely wrong shapes."""
    case = Case(strategy, "contiguous", heads=4, tokens=128 * world, thw=(2 * world, 8, 8))
    assert max(threads(world).run(run_case, case)) <= TOLERANCE
    assert max(threads(world).run(run_case, replace(case, sabotage=sabotage))) > 100 * TOLERANCE


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
