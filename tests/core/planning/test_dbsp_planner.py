"""Planner "dbsp": valid and equal plans for any mask, never below the bound, near it where that can be checked."""

from __future__ import annotations

import functools
import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dbsp_core import BlockGrid, BlockMask, SequenceLayout, Strategy, make_plan
from dbsp_core.planning.balanced.head_swaps import match_ulysses_ranks
from dbsp_core.planning.balanced.planner import plan_rows
from dbsp_core.planning.balanced.ring_slots import balance_slots
from dbsp_core.planning.balanced.row_moves import move_rows
from dbsp_core.planning.balanced.work import RingSchedule, head_shards
from dbsp_core.planning.baselines import greedy_heads
from dbsp_core.planning.bounds import bins_bound, whole_row_bound
from dbsp_core.planning.heads import balance_heads, local_search_heads
from dbsp_core.planning.imbalance import imbalance_ratio, work_by_ring_step
from dbsp_core.planning.planner_input import PlannerInput
from tests.support.oracle import cell_counts


def count_work_by_slot(bits: np.ndarray, slots: np.ndarray, ring: int) -> np.ndarray:
    """int64[H, nq, y]: dense blocks of each row by slot."""
    one_hot = (slots[:, :, None] == np.arange(ring)).astype(np.int64)
    return bits.astype(np.int64) @ one_hot


def plan(bits: np.ndarray, ulysses: int, ring: int, **options: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(owner, slots, work) of a mask whose blocks live in stripes."""
    q_home, k_home = np.arange(bits.shape[1]) % ring, np.arange(bits.shape[2]) % ring
    rows, columns = bits.sum(axis=2), bits.sum(axis=1)
    work_by_slot = functools.partial(count_work_by_slot, bits, ring=ring)
    inputs = PlannerInput(Strategy(ulysses, ring), rows, columns, q_home, k_home, lambda: q_home, work_by_slot)
    owner, slots = plan_rows(inputs, **options)
    work = work_by_ring_step(cell_counts(bits, owner, slots, ulysses * ring, ring), ulysses)
    return owner, slots, work


@st.composite
def masks(draw: st.DrawFn, heads: int = 6, blocks: int = 14) -> np.ndarray:
    """bool[H, nq, nk] with heads, rows and columns of any density, empty and full ones too."""
    shape = draw(st.integers(1, heads)), draw(st.integers(1, blocks)), draw(st.integers(1, blocks))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    levels = draw(st.sampled_from([(0.0,), (1.0,), (0.0, 1.0), (0.02, 0.9), (0.1, 0.4, 1.0)]))
    density = rng.choice(levels, shape[0])[:, None, None] * rng.choice((0.3, 1.0), shape[1])[:, None]
    return rng.random(shape) < density


degrees = st.integers(1, 5)


@given(bits=masks(), ulysses=degrees, ring=degrees)
@settings(max_examples=150, deadline=None)
def test_any_mask_gets_a_valid_plan_the_same_every_time_and_not_below_its_bound(bits, ulysses, ring):
    owner, slots, work = plan(bits, ulysses, ring)
    again = plan(bits, ulysses, ring)
    assert np.array_equal(owner, again[0])
    assert np.array_equal(slots, again[1])
    assert owner.shape == bits.shape[:2]
    assert owner.min() >= 0
    assert owner.max() < ulysses * ring
    assert slots.shape == (bits.shape[0], bits.shape[2])
    assert slots.min() >= 0
    assert slots.max() < ring
    rows, columns = bits.sum(axis=2), bits.sum(axis=1)
    free, given_slots = (whole_row_bound(rows, columns, ulysses, ring, s) for s in (None, slots))
    assert 1 <= free <= imbalance_ratio(work) + 1e-12
    assert 1 <= given_slots <= imbalance_ratio(work) + 1e-12


@given(bits=masks(heads=8), columns=st.integers(1, 9))
@settings(max_examples=150, deadline=None)
def test_heads_are_split_at_most_x_minus_1_times_and_columns_stay_within_a_row_of_the_mean(bits, columns):
    rows = bits.sum(axis=2)
    owner = balance_heads(rows, columns)
    load = np.bincount(owner.ravel(), weights=rows.ravel(), minlength=columns)
    pieces = sum(len(np.unique(owner[head])) for head in range(len(owner)))
    assert pieces - len(owner) <= columns - 1
    assert load.max() <= max(-(-rows.sum() // columns), int(rows.sum() * 1.002) // columns) + rows.max()


@given(work=st.lists(st.integers(0, 50), min_size=1, max_size=12), columns=st.integers(1, 5))
def test_refinement_never_fills_the_fullest_column_more(work, columns):
    work = np.array(work)
    before = greedy_heads(work, columns)
    after = local_search_heads(work, before, columns, 0)
    loads = [np.bincount(column, weights=work, minlength=columns) for column in (before, after)]
    assert loads[1].sum() == loads[0].sum()
    assert loads[1].max() <= loads[0].max()


def test_heads_that_fit_whole_are_not_split():
    rows = np.random.default_rng(0).integers(100, 900, (40, 300)) // np.arange(1, 41)[:, None]
    owner = balance_heads(rows, 4)
    assert (owner == owner[:, :1]).all()


@pytest.mark.parametrize(("heads", "columns"), [(12, 8), (5, 6), (5, 8), (3, 8), (1, 4), (40, 7)])
def test_any_number_of_heads_is_level_on_any_number_of_columns(heads, columns):
    rng = np.random.default_rng(heads)
    rows = rng.binomial(1182, rng.beta(1, 2, heads)[:, None] * np.linspace(1, 0.4, 1182))
    owner = balance_heads(rows, columns)
    load = np.bincount(owner.ravel(), weights=rows.ravel(), minlength=columns)
    assert load.max() * columns <= 1.002 * load.sum()


@given(seed=st.integers(0, 1000), columns=st.integers(2, 3), heads=st.integers(1, 3))
@settings(max_examples=40, deadline=None)
def test_small_cases_of_heads_are_within_one_row_of_the_best_of_all_assignments(seed, columns, heads):
    rows = np.random.default_rng(seed).integers(0, 9, (heads, 6 // heads))
    best = min(
        np.bincount(owners, weights=rows.ravel(), minlength=columns).max()
        for owners in map(list, itertools.product(range(columns), repeat=rows.size))
    )
    owner = balance_heads(rows, columns, target_rho=1.0)
    ours = np.bincount(owner.ravel(), weights=rows.ravel(), minlength=columns).max()
    assert bins_bound(rows.ravel(), columns) <= best <= ours <= best + rows.max()


@given(seed=st.integers(0, 1000), shape=st.sampled_from([(1, 2), (1, 3), (2, 2)]))
@settings(max_examples=25, deadline=None)
def test_small_rings_and_hybrids_are_within_one_row_of_the_best_of_all_owners(seed, shape):
    ulysses, ring = shape
    rng = np.random.default_rng(seed)
    bits = rng.random((2, 3, 6)) < rng.choice([0.2, 0.5, 0.9], (2, 3, 1))
    _, slots, work = plan(bits, ulysses, ring, target_rho=1.0)
    cells, schedule = count_work_by_slot(bits, slots, ring).reshape(6, ring), RingSchedule(ulysses, ring)
    owners = np.array(list(itertools.product(range(ulysses * ring), repeat=6)))
    every = np.zeros((len(owners), ring, ulysses * ring), dtype=np.int64)
    for row in range(6):
        ring_step = schedule.ring_step[:, owners[:, row]]  # [y, candidates]
        every[np.arange(len(owners)), ring_step, owners[:, row]] += cells[row][:, None]
    best, ours = int(every.max(axis=2).sum(axis=1).min()), int(work.max(axis=1).sum())
    bound = whole_row_bound(bits.sum(axis=2), bits.sum(axis=1), ulysses, ring, slots)
    assert bound * bits.sum() <= best * ulysses * ring + 1e-9
    assert best <= ours <= best + bits.sum(axis=2).max()


@given(seed=st.integers(0, 1000), ring=st.integers(2, 6))
@settings(max_examples=40, deadline=None)
def test_slots_become_level_and_pieces_stay_in_their_group(seed, ring):
    rng = np.random.default_rng(seed)
    columns = rng.integers(0, 200, (6, 60))
    columns[:, 0] = 900  # a sink in every head
    group = np.arange(6) // 3
    slots = balance_slots(columns, np.arange(60) % ring, group, ring, target_rho=1.01)
    for one in range(2):
        load = np.bincount(slots[group == one].ravel(), weights=columns[group == one].ravel(), minlength=ring)
        assert load.max() <= 1.01 * load.mean() + 1
    assert (slots != np.arange(60) % ring).mean() < 0.2


@given(seed=st.integers(0, 1000), ulysses=st.integers(1, 3), ring=st.integers(2, 4))
@settings(max_examples=40, deadline=None)
def test_single_rows_only_make_a_plan_better(seed, ulysses, ring):
    rng = np.random.default_rng(seed)
    cells = rng.binomial(30, rng.random((7, 20, 1)), (7, 20, ring))
    column = np.repeat(greedy_heads(cells.sum(axis=(1, 2)), ulysses), 20).reshape(7, 20)
    q_home, periods = np.arange(20) * ring // 20, RingSchedule(ulysses, ring)
    parts = head_shards(cells, column, q_home, periods)
    work = parts.work_by_rank(parts.ulysses_rank, ulysses)
    assert np.array_equal(work, _work(cells, q_home * ulysses + column, periods))
    matched = parts.work_by_rank(match_ulysses_ranks(parts, ulysses), ulysses)
    assert matched.max(axis=1).sum() <= work.max(axis=1).sum()
    owner, _ = move_rows(cells, column, q_home, work, periods, target_rho=1.0)
    assert _work(cells, owner, periods).max(axis=1).sum() <= work.max(axis=1).sum()


def _work(cells: np.ndarray, owner: np.ndarray, periods: RingSchedule) -> np.ndarray:
    """int64[y, P] from scratch."""
    by_slot = np.zeros((periods.world, periods.ring), dtype=np.int64)
    np.add.at(by_slot, owner, cells)
    return work_by_ring_step(by_slot, periods.ulysses)


@pytest.mark.parametrize(("ulysses", "ring"), [(1, 8), (2, 4), (4, 2), (1, 6), (3, 2)])
@pytest.mark.parametrize("seed", [0, 1])
def test_stripes_need_few_moved_rows_to_reach_the_tolerance(ulysses, ring, seed):
    rng = np.random.default_rng(seed)
    wave = np.interp(np.linspace(0, 4, 384), np.arange(5), rng.uniform(0.4, 1, 5))
    density = rng.beta(2, 3, 12)[:, None, None] * wave[:, None] * wave[::-1]
    bits = rng.random((12, 384, 384)) < density
    owner, slots, work = plan(bits, ulysses, ring)
    home = np.arange(384) % ring
    moved = ((owner // ulysses != home).mean() + 2 * (slots != home).mean()) / 3
    assert imbalance_ratio(work) <= 1.005
    assert moved <= 0.02


def test_the_planner_is_never_worse_than_leaving_everything_where_it_is():
    rng = np.random.default_rng(0)
    for _ in range(150):
        strategy = Strategy(int(rng.integers(1, 5)), int(rng.integers(1, 5)))
        grid = BlockGrid.uniform(8 * int(rng.integers(strategy.ring, 24)) - 3, block=8)
        shape = (int(rng.integers(1, 9)), grid.nq, grid.nk)
        bits = rng.random(shape) < rng.random() * 2 * rng.random((shape[0], 1, 1)) * rng.random((1, grid.nq, 1))
        mask = BlockMask(torch.from_numpy(bits), grid)
        for name in ("contiguous", "striped"):
            layout = SequenceLayout.named(name, grid, strategy)
            plans = {planner: make_plan(mask, strategy, planner, layout=layout) for planner in ("dbsp", "contiguous")}
            assert plans["dbsp"].rho <= plans["contiguous"].rho + 1e-12
