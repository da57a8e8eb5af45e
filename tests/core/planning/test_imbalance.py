"""The sparse imbalance ratio: examples worked out by hand, and Eq. 1 by plain loops."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dbsp_core.planning.imbalance import imbalance_ratio, work_by_ring_step
from tests.support.generators import EVERY_STRATEGY, SEEDS, examples
from tests.support.oracle import cell_counts


def test_ulysses_by_hand():
    # Eq. 2. Four heads of 4×4 blocks with 7, 3, 2 and 4 dense blocks; two ranks, heads {0, 1} and {2, 3}:
    # b = 10 and 6, so ρ_s = 10 / (16 / 2) = 1.25.
    bits = np.zeros((4, 16), dtype=bool)
    for head, dense in enumerate((7, 3, 2, 4)):
        bits[head, :dense] = True
    owner = np.repeat([0, 0, 1, 1], 4).reshape(4, 4)
    cells = cell_counts(bits.reshape(4, 4, 4), owner, np.zeros((4, 4), dtype=int), world=2, ring=1)
    work = work_by_ring_step(cells, ulysses=2)
    assert work.tolist() == [[10, 6]]
    assert imbalance_ratio(work) == 1.25


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

SECOND_HEAD = np.array(
    [
        [1, 0, 1, 1],
        [0, 0, 1, 1],
        [0, 0, 1, 1],
        [0, 0, 1, 0],
    ],
    dtype=bool,
)
"""Quarters 1, 4 above 0, 3."""

HALVES = np.array([0, 0, 1, 1])


def test_ring_by_hand():
    # Eq. 3. Two ranks, one head: rank 0 has query blocks 0, 1; slot 0 carries KV blocks 0, 1.
    # Period 0: rank 0 with slot 0 does 4, rank 1 with slot 1 does 0: all wait for 4.
    # Period 1: rank 0 with slot 1 does 1, rank 1 with slot 0 does 3: all wait for 3.
    # ρ_s = (4 + 3) / (8 / 2) = 1.75. In sum the ranks do 5 and 3: with no wait in between it would be 1.25.
    cells = cell_counts(FIRST_HEAD[None], HALVES[None], HALVES[None], world=2, ring=2)
    work = work_by_ring_step(cells, ulysses=1)
    assert cells.tolist() == [[4, 1], [3, 0]]
    assert work.tolist() == [[4, 0], [1, 3]]
    assert imbalance_ratio(work) == 1.75


def test_hybrid_by_hand():
    # U2R2, rank = ring rank · 2 + column; column 0 computes the first head, column 1 the second.
    # Period 0: ranks 0, 1 have slot 0 and do 4, 1; ranks 2, 3 have slot 1 and do 0, 3: all wait for 4.
    # Period 1: ranks 0, 1 have slot 1 and do 1, 4; ranks 2, 3 have slot 0 and do 3, 0: all wait for 4.
    # ρ_s = (4 + 4) / (16 / 4) = 2. In sum the ranks do 5, 5, 3, 3: with no wait in between it would be 1.25.
    owner = np.stack([HALVES * 2, HALVES * 2 + 1])
    cells = cell_counts(np.stack([FIRST_HEAD, SECOND_HEAD]), owner, np.stack([HALVES, HALVES]), world=4, ring=2)
    work = work_by_ring_step(cells, ulysses=2)
    assert work.tolist() == [[4, 1, 0, 3], [1, 4, 3, 0]]
    assert imbalance_ratio(work) == 2.0


def test_no_work_is_balanced():
    assert imbalance_ratio(np.zeros((3, 6), dtype=np.int64)) == 1.0


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
        period = next(p for p in range(y) if (owner[h, i] // x + p) % y == slot[h, j])
        b[period, int(owner[h, i])] += 1
    work = work_by_ring_step(cell_counts(bits, owner, slot, world, y), x)
    assert work.tolist() == [[b[period, rank] for rank in range(world)] for period in range(y)]
    slowest = sum(max(b[period, rank] for rank in range(world)) for period in range(y))
    assert imbalance_ratio(work) == pytest.approx(slowest / (b.total() / world) if b else 1.0)
