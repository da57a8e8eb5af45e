"""The latency model against what the paper's authors measured: bars, layer times, choosing, and Fig. 9's points."""

from __future__ import annotations

import numpy as np
import pytest

from dbsp_core.cost.machine import load_hardware
from scripts.reproduce import fig8, fig10
from scripts.reproduce.authors import fit
from scripts.reproduce.authors.measured import STRATEGIES, attention_ms, bars, fitted_half
from scripts.reproduce.authors.runs import UNKNOWNS, attention_s

LAYERS = 6


def test_bars_that_nothing_was_fitted_to_are_met():
    rows = [row for row in fig8.measure() if row.half == "held out"]
    errors = np.abs([row.error for row in rows])
    assert (len(errors), {row.gpus for row in rows}) == (48, {4})
    assert np.median(errors) <= 0.05
    assert errors.max() <= 0.12
    wrong, pairs = fig8.wrong_order(rows)
    assert pairs == 62
    assert len(wrong) <= 2
    assert all("U4R1" in line for line in wrong)


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
        monkeypatch.setattr(fig10, "BLOCK", 512)
        hardware = load_hardware("a800")
        mask = fig10.family_mask(39, hardware, 512)
        assert mask.bits[20].float().mean() > 6 * mask.bits[0].float().mean()
        rows = fig10.measure(LAYERS)
        assert max(abs(row.error) for row in rows) <= 0.08
        assert fig10.table(rows, "ours_ms").min(axis=1).sum() < fig10.table(rows, "modelled_ms").min(axis=1).sum()
        times = attention_ms()[:, :LAYERS]
        auto = fig10.table(rows, "modelled_ms").argmin(axis=1)
        taken = sum(times[:, layer, choice].sum() for layer, choice in enumerate(auto))
        assert taken / times.min(axis=2).sum() - 1 <= 0.01
        assert any("regret" in line for line in fig10.summary(rows))


def test_constants_in_files_are_what_the_fit_finds():
    files = {name: load_hardware(name).with_kernel("sparge") for name in fit.MACHINES}
    given = [bar for bar in bars() if bar.fitted]
    found = fit.fit_bars({name: one.constants for name, one in files.items()}, given)
    for name, one in files.items():
        for key in ("flops_per_s", "score_s", "linear_flops_per_s", "serial_s"):
            assert getattr(one.constants, key) == pytest.approx(getattr(found.machines[name], key), rel=0.01)
    assert len({one.constants.serial_s for one in files.values()}) == 1
    assert found.unknowns.tile_cost == pytest.approx(UNKNOWNS.tile_cost, rel=0.01)
    assert found.unknowns.token_head_s == pytest.approx(UNKNOWNS.token_head_s, rel=0.01)
    assert found.unknowns.sparge_density == pytest.approx(UNKNOWNS.sparge_density, rel=0.01)
