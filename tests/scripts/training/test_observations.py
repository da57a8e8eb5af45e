"""What is made of DSV's observations: their figures beside chance, the arms' tables, and the pictures."""

from __future__ import annotations

import csv
from dataclasses import fields

import pytest
import torch

pytest.importorskip("diffusers")
pytest.importorskip("skimage")


def test_claims_stand_beside_chance():
    from scripts.training.trained_model.attention_measures import observe
    from scripts.training.trained_model.observations import Head, claims, draw

    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(2, 9 * 9 * 15, 24, generator=generator) for _ in range(2))
    heads = [
        Head(**vars(one), layer=layer, head=head)
        for layer in (0, 1)
        for head, one in enumerate(observe(query[layer : layer + 1], key[layer : layer + 1], 24**-0.5, (9, 9, 15)))
    ]
    rows = claims(heads)
    found = {row.what: row for row in rows}
    assert found["R² of lognormal, all keys"].value > 0.99, "random products of queries and keys are normal"
    assert found["R² of lognormal, all keys"].chance < 0.9 < found["R² of power, all keys"].chance
    near = [row for row in rows if row.observation == 2 and row.label != "counted"]
    assert len(near) == 8
    assert all(row.value == pytest.approx(row.chance, abs=0.01) for row in near), "random keys lie anywhere"
    assert found["best 10%: shared with its cube of 2×2×2"].value == pytest.approx(0.11, abs=0.02)
    assert all(row.least <= row.value + 1e-9 and row.value <= row.most + 1e-9 for row in rows)
    assert len(draw(rows).axes) == 4


def test_checkpoints_are_drawn_and_written(tmp_path):
    from scripts.training.trained_model.over_training import TRAINING, Checkpoint

    numbers = {field.name: 0.5 for field in fields(Checkpoint)[3:-1]}
    rows = [Checkpoint("run", step, layer, **numbers) for step in (0, 10) for layer in (0, 1)]
    rows += [Checkpoint("shipped", 3200, layer, **numbers) for layer in (0, 1)]
    figure = TRAINING.draw(rows)
    assert [len(axes.lines) for axes in figure.axes] == [4, 4, 2], "a line and a star for each layer; one loss"
    TRAINING.publish(rows, tmp_path)
    assert (tmp_path / "dsv-training.png").stat().st_size > 10_000


def test_windows_are_as_dense_as_they_are_said_to_be():
    from dbsp_core.config.config import DbspConfig
    from dbsp_core.sources import MaskRequest
    from scripts.training.trained_model.window_arms import ARMS

    def density(name: str) -> float:
        source = DbspConfig.load({"mask": ARMS[name]}).mask
        return float(source.mask(MaskRequest(0, 1, (9, 9, 15))).bits.float().mean())

    assert density("window, medium") == pytest.approx(0.116, abs=0.001), "no less than predicted masks' 0.10"
    assert density("window, large") == pytest.approx((2 / 3) ** 3, abs=0.02)


def test_arms_are_drawn_and_written(tmp_path):
    from scripts.training.trained_model.window_arms import ARM_RESULTS, Row

    rows = [
        Row("dense", 0, 1.0, float("nan"), 0.10, 0.0, float("inf"), 1.0),
        Row("dense", 4, 1.0, 0.11, 0.10, 0.0, 25.0, 0.9),
        Row("predicted", 0, 0.1, float("nan"), 0.40, 3.0, 15.0, 0.8),
        Row("predicted", 4, 0.1, 0.2, 0.20, 1.0, 20.0, 0.9),
    ]
    bars = [sorted(bar.get_height() for bar in axes.patches) for axes in ARM_RESULTS.draw(rows).axes]
    assert bars == [[0.10, 0.10, 0.20, 0.40], [15.0, 20.0, 25.0]], "what videos are compared with has no bar"
    ARM_RESULTS.publish(rows, tmp_path)
    with (tmp_path / "dsv-windows.csv").open(newline="") as file:
        assert [row["gap"] for row in csv.DictReader(file)] == ["0.0", "0.0", "3.0", "1.0"]
