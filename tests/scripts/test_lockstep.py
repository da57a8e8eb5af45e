"""Rings in lockstep: ρ_s of examples worked out by hand, and Eq. 1 by plain loops."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dbsp_core import BlockGrid, BlockMask
from scripts.reproduce.lockstep import eq_1, plan_ring, work_by_ring_step
from tests.support.generators import EVERY_STRATEGY, SEEDS, examples


def cell_counts(bits: np.ndarray, q_owner: np.ndarray, kv_slot: np.ndarray, world: int, ring: int) -> np.ndarray:
    """int64[world, ring]: active blocks by (rank that computes them, ring slot their keys are in).

    bits: bool[H, nq, nk]; q_owner: int[H, nq], rank of each row; kv_slot: int[H, nk], slot of each KV block
    """
    cells = np.zeros((world, ring), dtype=np.int64)
    head, row, block = np.nonzero(bits)
    np.add.at(cells, (q_owner[head, row], kv_slot[head, block]), 1)
    return cells


FIRST_HEAD = np.array(
    [
        [1, 1, 1, 0],
        [1, 1, 0, 0],
        [1, 1, 0, 0],
        [0, 1, 0, 0],
    ],
    dtype=bool,
)
"""Its quarters, by (ring rank, slot) when query and KV blocks are both cut in half: 4, 1 above 3, 0."""


HALVES = np.array([0, 0, 1, 1])


def test_ring_by_hand():
    # Eq. 3. Two ranks, one head: rank 0 has query blocks 0, 1; slot 0 carries KV blocks 0, 1.
    # Ring step 0: rank 0 with slot 0 does 4, rank 1 with slot 1 does 0: all wait for 4.
    # Ring step 1: rank 0 with slot 1 does 1, rank 1 with slot 0 does 3: all wait for 3.
    # ρ_s = (4 + 3) / (8 / 2) = 1.75. In sum the ranks do 5 and 3: with no wait in between it would be 1.25.
    cells = cell_counts(FIRST_HEAD[None], HALVES[None], HALVES[None], world=2, ring=2)
    work = work_by_ring_step(cells, ulysses=1)
    assert cells.tolist() == [[4, 1], [3, 0]]
    assert work.tolist() == [[4, 0], [1, 3]]
    assert eq_1(work) == 1.75


@pytest.mark.parametrize("strategy", EVERY_STRATEGY, ids=str)
@given(heads=st.integers(1, 4), nq=st.integers(1, 9), nk=st.integers(1, 9), seed=SEEDS)
@examples(12)
def test_equals_eq_1_by_plain_loops(strategy, heads, nq, nk, seed):
    # Any owner of any row, any slot of any block of any head: more than today's planners make.
    rng = np.random.default_rng(seed)
    x, y, world = strategy.ulysses, strategy.ring, strategy.world
    bits = rng.random((heads, nq, nk)) < rng.random((heads, nq, 1)) * rng.random((heads, 1, nk))
    owner, slot = rng.integers(world, size=(heads, nq)), rng.integers(y, size=(heads, nk))
    b = Counter()
    for h, i, j in np.argwhere(bits).tolist():
        step = next(p for p in range(y) if (owner[h, i] // x + p) % y == slot[h, j])
        b[step, int(owner[h, i])] += 1
    work = work_by_ring_step(cell_counts(bits, owner, slot, world, y), x)
    assert work.tolist() == [[b[step, rank] for rank in range(world)] for step in range(y)]
    slowest = sum(max(b[step, rank] for rank in range(world)) for step in range(y))
    assert eq_1(work) == pytest.approx(slowest / (b.total() / world) if b else 1.0)


def causal() -> BlockMask:
    """8 tokens in blocks of 2: rows need 1, 2, 3, 4 blocks."""
    return BlockMask(np.tri(4, dtype=bool)[None], BlockGrid.uniform(8, 2))


def test_a_contiguous_plan_by_hand():
    # U1R2: rank 0 has rows 0, 1 and slot 0 has blocks 0, 1. Ring step 0: rank 0 does 3 (blocks 0; 0, 1), rank 1 does 3
    # (2; 2, 3). Ring step 1: rank 0 with slot 1 does 0, rank 1 with slot 0 does 4. ρ_s = (3 + 4) / (10 / 2) = 1.4.
    plan = plan_ring(causal(), "U1R2")
    assert plan.q_owner.tolist() == [[0, 0, 1, 1]]
    assert plan.slot.tolist() == [[0, 0, 1, 1]]
    assert plan.work.tolist() == [[3, 3], [0, 4]]
    assert (plan.rho, plan.moved) == (1.4, 0.0)


def test_a_paper_plan_by_hand():
    # R_b = 0. Rows, largest first: 4 → rank 0, 3 → rank 1, 2 → rank 1, 1 → rank 0: 5 | 5.
    # Columns have 4, 3, 2, 1 rows: block 0 → slot 0, block 1 → slot 1, block 2 → slot 1, block 3 → slot 0.
    # Rank 0 (rows 0, 3) does 3 in slot 0 (0; 0, 3) and 2 in slot 1 (1, 2); rank 1 (rows 1, 2) does 3 in slot 1
    # (1; 1, 2) and 2 in slot 0 (0; 0). Ring step 0: 3, 3; ring step 1: 2, 2. ρ_s = 5 / 5 = 1.
    # Outside attention ring rank 0 has blocks 0, 1: query and KV blocks 1 and 3 have moved, half of everything.
    plan = plan_ring(causal(), "U1R2", "paper", reward=0.0)
    assert plan.q_owner.tolist() == [[0, 1, 1, 0]]
    assert plan.slot.tolist() == [[0, 1, 1, 0]]
    assert plan.work.tolist() == [[3, 3], [2, 2]]
    assert (plan.rho, plan.moved) == (1.0, 0.5)


@pytest.mark.parametrize("planner", ["contiguous", "snake", "paper"])
@pytest.mark.parametrize("strategy", ["U4R1", "U2R2", "U1R4"])
def test_plans_are_of_whole_heads_and_blocks_and_their_work_is_eq_1s(planner, strategy):
    rng = np.random.default_rng(0)
    grid = BlockGrid.uniform(320, 16)
    mask = BlockMask(rng.random((6, 20, 20)) < rng.random((6, 20, 1)), grid)
    plan = plan_ring(mask, strategy, planner)
    x, y = plan.strategy.ulysses, plan.strategy.ring
    assert (plan.q_owner % x == plan.q_owner[:, :1] % x).all()
    assert (plan.q_owner // x == plan.q_owner[:1] // x).all()
    cells = cell_counts(mask.bits.numpy(), plan.q_owner, plan.slot, 4, y)
    assert (plan.work == work_by_ring_step(cells, x)).all()
    assert (plan.evaluate(mask).work == plan.work).all()
