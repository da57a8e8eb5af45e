"""The latency model against what the paper's authors measured: bars, layer times, choosing, and Fig. 9's points."""

from __future__ import annotations

import numpy as np
import pytest

from dbsp_core.cost.machine import load_hardware
from scripts.reproduce import fig8, fig9, fig10
from scripts.reproduce.authors import fit
from scripts.reproduce.authors.measured import STRATEGIES, attention_ms, bars, fitted_half, speedups
from scripts.reproduce.authors.runs import attention_s

LAYERS = 6


def test_the_data_are_whole():
    assert len(bars()) == 56
    assert len({bar.panel for bar in bars()}) == 12
    times = attention_ms()
    assert times.shape == (50, 40, 4)
    static = times.sum(axis=(0, 1)) / times.min(axis=2).sum()
    assert static.round(3).tolist() == [1.268, 1.09, 1.023, 1.018], "the paper's 1.02 to 1.27"
    assert (len(speedups("U8R1")), len(speedups("U1R8"))) == (7, 86)
    assert fitted_half(56).sum() == 28


def test_bars_that_nothing_was_fitted_to_are_met():
    rows = fig8.measure()
    errors = np.abs([row.error for row in rows if row.half == "held out"])
    assert len(errors) == 28
    assert np.median(errors) <= 0.05
    assert errors.max() <= 0.12
    ours = [row for row in rows if row.way == "db-SP" and "PARO" in row.method]
    assert ours
    assert all(row.rho_alone_s > row.modelled_s for row in ours)


class TestLayers:
    def test_three_numbers_meet_layers_that_they_were_not_fitted_to(self):
        known = load_hardware("a800").constants
        launch_s, blocks_s, growth_s = fit.fit_layers(known)
        assert launch_s == pytest.approx(known.launch_s, rel=1e-2), "the file has what was fitted"
        assert growth_s == pytest.approx(fit.GROWTH, rel=1e-2)
        measured = attention_ms().mean(axis=0)
        for layer in np.flatnonzero(~fitted_half(40)):
            for strategy, ms in zip(STRATEGIES, measured[layer], strict=True):
                alongside = attention_s(fit.WAN, strategy, known, 0.0)
                found = alongside + blocks_s + layer * growth_s * strategy.ulysses / 8
                assert found * 1e3 == pytest.approx(ms, rel=0.03)

    def test_plans_of_such_masks_are_predicted_so_and_strategies_chosen_right(self, monkeypatch):
        monkeypatch.setattr(fig10, "BLOCK", 256)
        hardware = load_hardware("a800")
        mask = fig10.family_mask(39, hardware, 256)
        assert mask.bits[20].float().mean() > 6 * mask.bits[0].float().mean()
        rows = fig10.measure(LAYERS)
        assert max(abs(row.error) for row in rows) <= 0.08
        assert fig10.table(rows, "ours_ms").min(axis=1).sum() < fig10.table(rows, "modelled_ms").min(axis=1).sum()
        times = attention_ms()[:, :LAYERS]
        auto = fig10.table(rows, "modelled_ms").argmin(axis=1)
        taken = sum(times[:, layer, choice].sum() for layer, choice in enumerate(auto))
        assert taken / times.min(axis=2).sum() - 1 <= 0.01
        assert any("regret" in line for line in fig10.summary(rows))


@pytest.mark.long
def test_constants_in_files_are_what_the_fit_finds():
    everything = bars()
    half = [bar for bar, fitted in zip(everything, fitted_half(len(everything)), strict=True) if fitted]
    files = {name: load_hardware(name).constants for name in fit.MACHINES}
    machines, unknowns = fit.fit_bars(files, half)
    for name, found in machines.items():
        kernel = vars(load_hardware(name).kernels["sparge"])
        given = {key: value for key, value in kernel.items() if isinstance(value, float)}
        assert given
        assert {key: getattr(found, key) for key in given} == pytest.approx(given, rel=0.05)
    assert unknowns.tile_cost == pytest.approx(fit.UNKNOWNS.tile_cost, rel=0.02)
    assert unknowns.reordered_cost == pytest.approx(fit.UNKNOWNS.reordered_cost, rel=0.02)
    assert unknowns.sparge_density == pytest.approx(fit.UNKNOWNS.sparge_density, rel=0.02)


def test_rings_reach_a_part_of_what_rho_promises():
    rows = [fig9.Row(name, fig9.AUTHORS, "", *point, "") for name in fig9.LEVELS for point in speedups(name).tolist()]
    assert fig9.reached(rows, "U8R1", fig9.AUTHORS) == pytest.approx(0.76, abs=0.01)
    assert fig9.reached(rows, "U1R8", fig9.AUTHORS) == pytest.approx(0.35, abs=0.01)
