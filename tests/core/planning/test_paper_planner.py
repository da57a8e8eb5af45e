"""Alg. 1 by hand, its properties, and bounds against exhaustive search."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dbsp_core.layout.strategy import Strategy
from dbsp_core.planning.balance import bins_bound, imbalance_ratio, rho_bound, work_by_rank
from dbsp_core.planning.planner_config import PlannerConfig
from dbsp_core.planning.planners import Problem, greedy, paper, snake_heads
from tests.support.generators import SEEDS, examples

WORKS = st.lists(st.integers(0, 40), min_size=1, max_size=20).map(np.array)
PARTS = st.integers(1, 6)


def loads(work: np.ndarray, part: np.ndarray, parts: int) -> np.ndarray:
    return np.bincount(part, weights=work, minlength=parts)


def test_greedy_by_hand():
    # Work 5, 3, 7, 2, 5 on two columns, largest first:
    # head 2 (7) → column 0: 7 | 0      head 0 (5) → column 1: 7 | 5      head 4 (5) → column 1:  7 | 10
    # head 1 (3) → column 0: 10 | 10    head 3 (2) → a tie, so column 0: 12 | 10
    assert greedy(np.array([5, 3, 7, 2, 5]), 2).tolist() == [1, 0, 0, 0, 1]
    # Uncapped: 9 → column 0, then every 1 → column 1. With at most two each, the last one must go to column 0.
    work = np.array([9, 1, 1, 1])
    assert greedy(work, 2).tolist() == [0, 1, 1, 1]
    assert greedy(work, 2, cap=2).tolist() == [0, 1, 1, 0]


def test_greedy_with_a_bias_by_hand():
    work, initial = np.array([3, 4, 6, 3]), np.array([0, 0, 0, 1])
    # Largest first. 6 → part 0: 6 | 0    4 → part 1: 6 | 4    first 3 → part 1: 6 | 7    second 3 → part 0: 9 | 7
    assert greedy(work, 2, initial=initial, reward=0.0).tolist() == [1, 1, 0, 0]
    # R_b = 1 takes the block's own work off its initial part:
    # 6 at 0: −6 < 0, stays:       6 | 0        4 at 0: 6 − 4 = 2 > 0, moves:    6 | 4
    # 3 at 0: 6 − 3 = 3 < 4, stays: 9 | 4       3 at 1: 4 − 3 = 1 < 9, stays:    9 | 7
    # The same balance as without reward, with one block moved and not three.
    assert greedy(work, 2, initial=initial, reward=1.0).tolist() == [0, 1, 0, 1]


@given(WORKS, PARTS, st.floats(0, 5), SEEDS)
@examples(80)
def test_reward_costs_at_most_its_share_of_one_block(work, parts, reward, seed):
    # A block stays only where load − reward·work is least, hence at most reward·work above the least load.
    initial = np.random.default_rng(seed).integers(parts, size=len(work))
    part = greedy(work, parts, initial=initial, reward=reward)
    assert set(part.tolist()) <= set(range(parts))
    assert loads(work, part, parts).max() <= work.sum() / parts + (1 + reward) * work.max() + 1e-6


def test_paper_and_snake_by_hand():
    causal = Problem(Strategy(1, 2), np.array([[1, 2, 3, 4]]), np.array([0, 0, 1, 1]))
    # R_b = 0, largest first: 4 → rank 0, 3 → rank 1, 2 → rank 1, 1 → rank 0: 5 | 5.
    assert paper(causal, reward=0.0).tolist() == [[0, 1, 1, 0]]
    # Heads of 91, 1, 1 and 1 blocks: one rank takes the large one alone, unless heads must be two and two.
    heads = Problem(Strategy(2, 1), np.array([[91], [1], [1], [1]]), np.array([0]))
    assert paper(heads).ravel().tolist() == [0, 1, 1, 1]
    assert np.bincount(paper(heads, equal_heads=True).ravel()).tolist() == [2, 2]
    assert PlannerConfig("paper", reward=0).assign(causal).tolist() == [[0, 1, 1, 0]]
    assert PlannerConfig("paper").assign(causal).tolist() == paper(causal, reward=1.0).tolist() == [[0, 0, 0, 1]]
    # Heads 0, 2, 4, 3, 1 by falling work, to columns 0 1 1 0 0.
    assert snake_heads(np.array([5, 1, 4, 2, 3]), 2).tolist() == [0, 0, 1, 0, 1]


@pytest.mark.parametrize(
    ("items", "bins", "bound"),
    [
        ([5, 5, 5], 2, 10),  # three of five in two bins: two share one, though the mean is 7.5
        ([10, 1, 1], 2, 10),  # the largest is somewhere
        ([3, 3, 2, 2], 2, 5),  # the mean, and it can be had
        ([4, 3, 3, 3, 3], 2, 9),  # k = 2: of the five largest, three share a bin
        ([1, 1, 1], 2, 2),  # the mean, 1.5, rounded up
        ([0, 0], 2, 0),
    ],
)
def test_bins_bound_by_hand(items, bins, bound):
    assert bins_bound(np.array(items), bins) == bound


@given(st.lists(st.integers(0, 12), min_size=1, max_size=6), st.integers(1, 3))
@examples(80)
def test_bins_bound_is_never_above_the_best_packing(items, bins):
    work = np.array(items)
    packings = itertools.product(range(bins), repeat=len(items))
    assert bins_bound(work, bins) <= min(loads(work, np.array(p), bins).max() for p in packings)


def test_ratio_and_its_bound_by_hand():
    # Eq. 2. Heads {0, 1} and {2, 3} have 10 and 6 active blocks: ρ_s = 10 / (16 / 2) = 1.25.
    owner, work = np.array([[0], [0], [1], [1]]), np.array([[7], [3], [2], [4]])
    assert work_by_rank(owner, work, 2).tolist() == [10, 6]
    assert imbalance_ratio(work_by_rank(owner, work, 2)) == 1.25
    assert imbalance_ratio(np.array([4, 0])) == 2.0, "ranks without rows count"
    assert imbalance_ratio(np.zeros(3, dtype=np.int64)) == 1.0
    # Four ranks and a row of 6 blocks among rows of 1: whoever has it does 6, where the mean is 2.25.
    assert rho_bound(np.array([[6, 1, 1, 1]]), 4) == 6 * 4 / 9
