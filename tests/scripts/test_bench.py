"""Benchmarks print what they promise."""

from __future__ import annotations

import json

from tests.support.programs import run_module


def test_rounding_errors_in_exchanges():
    done = run_module("scripts.bench.rounding_error", "--tokens", 512, "--heads", 1, "--json")
    assert done.returncode == 0, done.stderr
    for errors in json.loads(done.stdout)["relative_errors"].values():
        assert errors["fp8 e4m3"] > 3 * errors["int8, k less its mean"] > 5e-3


def test_planning_of_sequences():
    done = run_module("scripts.bench.sequences.sharing", "--repeats", 1, "--json")
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["rows"]
    assert [row["sequences"] for row in rows if row["gpus"] == 32] == [128] * 6 + [1024] * 3
    assert 0 < max(row["worst_wir"] for row in rows if row["bags"].startswith("g8")) <= 1.005
