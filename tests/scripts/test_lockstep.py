"""Rings in lockstep: Eq. 1 by plain loops, and times of ring steps by events played through."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dbsp_core import BlockGrid, BlockMask, Strategy
from scripts.reproduce.lockstep import eq_1, plan_ring, ring_times, work_by_ring_step
from tests.support.generators import EVERY_STRATEGY, SEEDS, examples


def cell_counts(bits: np.ndarray, q_owner: np.ndarray, kv_slot: np.ndarray, world: int, ring: int) -> np.ndarray:
    """Returns int64[world, ring], active blocks of bool[H, nq, nk] by the rank that computes and the slot of keys."""
    cells = np.zeros((world, ring), dtype=np.int64)
    head, row, block = np.nonzero(bits)
    np.add.at(cells, (q_owner[head, row], kv_slot[head, block]), 1)
    return cells


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


def test_a_paper_plan_by_hand():
    # 8 tokens in blocks of 2: rows need 1, 2, 3, 4 blocks.
    # R_b = 0. Rows, largest first: 4 → rank 0, 3 → rank 1, 2 → rank 1, 1 → rank 0: 5 | 5.
    # Columns have 4, 3, 2, 1 rows: block 0 → slot 0, block 1 → slot 1, block 2 → slot 1, block 3 → slot 0.
    # Rank 0 (rows 0, 3) does 3 in slot 0 (0; 0, 3) and 2 in slot 1 (1, 2); rank 1 (rows 1, 2) does 3 in slot 1
    # (1; 1, 2) and 2 in slot 0 (0; 0). Ring step 0: 3, 3; ring step 1: 2, 2. ρ_s = 5 / 5 = 1.
    # Outside attention ring rank 0 has blocks 0, 1: query and KV blocks 1 and 3 have moved, half of everything.
    mask = BlockMask(np.tri(4, dtype=bool)[None], BlockGrid.uniform(8, 2))
    plan = plan_ring(mask, "U1R2", "paper", reward=0.0)
    assert plan.q_owner.tolist() == [[0, 1, 1, 0]]
    assert plan.slot.tolist() == [[0, 1, 1, 0]]
    assert plan.work.tolist() == [[3, 3], [2, 2]]
    assert (plan.rho, plan.moved) == (1.0, 0.5)


@pytest.mark.parametrize("strategy", [Strategy(1, 5), Strategy(2, 3), Strategy(3, 2)], ids=str)
def test_ranks_that_run_ahead_are_between_even_totals_and_waiting_for_all(strategy):
    generator = np.random.default_rng(strategy.ring)
    for _ in range(20):
        compute = generator.gamma(1.0, size=(strategy.ring, strategy.world))
        p2p = generator.gamma(0.2, size=strategy.ring - 1).tolist()
        found = ring_times(compute, p2p, strategy, 1.0).attention_s
        assert found == pytest.approx(max(played(compute, p2p, strategy)))
        assert compute.sum(axis=0).max() <= found
        assert found <= np.maximum(compute.max(axis=1), [*p2p, 0.0]).sum() + 1e-12
    half_hidden = ring_times(np.ones_like(compute), [0.5] * (strategy.ring - 1), strategy, 0.5).attention_s
    assert half_hidden == strategy.ring + 0.25 * (strategy.ring - 1)


def played(compute: np.ndarray, p2p: list[float], strategy: Strategy) -> list[float]:
    """Returns when each rank is done, asked backwards: a rank's start of a ring step from those of the step before."""
    y, x = strategy.ring, strategy.ulysses

    def start(rank: int, step: int) -> float:
        if step == 0:
            return 0.0
        ring_rank, column = divmod(rank, x)
        around = [(ring_rank + shift) % y * x + column for shift in (-1, 0, 1)]
        sent = max(start(other, step - 1) for other in around) + p2p[step - 1]
        return max(start(rank, step - 1) + float(compute[step - 1, rank]), sent)

    return [start(rank, y - 1) + float(compute[-1, rank]) for rank in range(strategy.world)]
