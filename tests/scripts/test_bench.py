"""Benchmarks print what they promise: `attention.py` runs on real ranks and replays virtual ones."""

from __future__ import annotations

import csv
import json

import pytest

from tests.support.programs import run_module
from tests.support.repository import ROOT

SMALL = ("--tokens", "512", "--heads", "2", "--head-dim", "16", "--repeats", "1", "--json")


def test_prediction_is_timed_part_by_part(tmp_path):
    options = ("--part", "speed", "--tokens", "128", "256", "--repeats", "1", "--out", str(tmp_path))
    done = run_module("scripts.training.trained_model.prediction", *options)
    assert done.returncode == 0, done.stderr
    with (tmp_path / "prediction-speed.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["tokens"], row["sparsity"]) for row in rows][-2:] == [("256", "0.98"), ("128", "0.9")]
    for row in rows:
        spent = float(row["sparse_ms"]) + float(row["predict_ms"]) + float(row["prepare_ms"])
        assert float(row["speedup"]) == pytest.approx(float(row["dense_ms"]) / spent, rel=0.02, abs=1e-3)


@pytest.mark.parametrize(
    ("options", "strategies", "label"),
    [
        (["--ranks", "2"], ["U2R1", "U1R2"], "measured, 2 ranks"),
        (["--replay", "--gpus", "4"], ["U4R1", "U2R2", "U1R4"], "replayed"),
    ],
)
def test_json_has_the_documented_cases(options, strategies, label):
    done = run_module("scripts.bench.attention", *options, *SMALL)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["label"].startswith(label)
    assert [case["strategy"] for case in report["cases"]] == strategies
    for case in report["cases"]:
        assert case["rho_before"] >= case["rho"] >= 1
        assert case["speedup"] == case["seconds_before"] / case["seconds"]
        assert (case["communication_s"] > 0) == label.startswith("replayed")


def test_rounding_errors_on_the_wire():
    done = run_module("scripts.bench.wire.rounding_error", "--tokens", 512, "--heads", 1, "--json")
    assert done.returncode == 0, done.stderr
    for errors in json.loads(done.stdout)["relative_errors"].values():
        assert errors["fp8 e4m3"] > 3 * errors["int8, k less its mean"] > 5e-3


def test_planning_of_sequences():
    done = run_module("scripts.bench.sequences.sharing", "--repeats", 1, "--json")
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["rows"]
    assert [row["sequences"] for row in rows if row["gpus"] == 32] == [128] * 6 + [1024] * 3
    assert all(row["worst_wir"] <= 1.005 for row in rows if row["bags"].startswith("g8"))


def test_reuse_of_plans_on_recorded_masks():
    masks = ROOT / "tests" / "data" / "learned-masks.safetensors"
    done = run_module("scripts.bench.reuse", "--masks", masks, "--layers", 1, "--strategies", "U4R1", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["label"], report["masks"]) == ("measured on recorded masks", masks.name)
    used = {row["rule"]: (row["plans"], row["rho_used"]) for row in report["rows"]}
    assert used["budget, sync"][0] >= used["threshold, sync"][0]
    assert used["threshold, sync"][1] <= 1.10
