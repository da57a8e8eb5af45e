"""Eq. 4 as the paper prints it: by hand, and next to the corrected form."""

from __future__ import annotations

import pytest

from dbsp_core import Strategy
from scripts.reproduce.eq4 import as_printed, predict_as_printed
from scripts.reproduce.lockstep import plan_ring, predict_ring
from tests.core.cost.latency_cases import a_plan, machine, shape_of
from tests.support.programs import run_module


def test_equation_4_by_hand():
    # comp = 80 / 8 · 0.5 + 1 = 6; (max(6, 9) · 3 + 6) · 1.25 = 41.25; and 2 of all-to-all
    terms = {"all2all_s": 2.0, "p2p_s": 9.0, "dense_s": 80.0, "launch_s": 1.0}
    assert as_printed(Strategy(2, 4), rho=1.25, density=0.5, **terms) == pytest.approx(43.25)
    assert as_printed(Strategy(8, 1), rho=1.25, density=0.5, **terms) == pytest.approx(2 + 6 * 1.25)


def test_it_agrees_with_the_corrected_form_for_ulysses_and_charges_rings_y_times():
    for strategy in ("U4R1", "U1R4"):
        _, mask, _ = a_plan(strategy)
        plan = plan_ring(mask, strategy, "paper")
        free, shape = machine(flops_per_s=1e9), shape_of(plan)
        times = predict_ring(plan, shape, free).times
        slowest_of_each_step_s = plan.work.sum(axis=0).mean() * (4 * 16 * 16 * 8 / 1e9) * plan.rho
        printed_s = predict_as_printed(plan, mask.density, shape, free)
        assert printed_s == pytest.approx(slowest_of_each_step_s * plan.strategy.ring)
        assert times.attention_s <= slowest_of_each_step_s * (1 + 1e-9)  # less where ranks run ahead of others


@pytest.mark.long
def test_the_program_shows_both():
    done = run_module("scripts.reproduce.eq4", "--coarsen", "16", "--gpus", "4", "--planners", "dbsp")
    assert done.returncode == 0, done.stderr
    assert "U1R4" in done.stdout
