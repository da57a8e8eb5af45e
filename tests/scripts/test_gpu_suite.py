"""scripts/gpu_suite from a bare checkout, on tiny shapes in Triton's interpreter."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys

import pytest
import torch

from tests.support.repository import ROOT

SUITE = ROOT / "scripts" / "gpu_suite"


def run(*args: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHON": sys.executable, "PYTHONPATH": ""}
    return subprocess.run([str(SUITE), *args], capture_output=True, text=True, env=environment, timeout=300)


@pytest.mark.long
def test_a_dry_run_checks_measures_and_reports(tmp_path):
    pytest.importorskip("triton")
    done = run("--dry-run", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "kernels.json").read_text())
    assert (report["dry_run"], report["complete"]) == (True, True)
    assert {"python", "torch", "triton", "numpy", "cuda"} == set(report["versions"])
    assert "skipped" in report["tests"]["says"], "the tests were collected"
    assert all(math.isfinite(row["value"]) and row["value"] >= 0 for row in report["rows"])
    what = {row["what"]: row for row in report["rows"]}
    errors = [row for name, row in what.items() if "relative error" in name]
    assert errors
    assert all(0 < row["value"] < 1e-5 and row["met"] for row in errors)
    goals = [row["goal"] for row in report["rows"]]
    assert {"≥ 0.75", "≥ 0.55", "≤ 1.05", "≤ 1.3", "≤ 1.03"} <= set(goals)
    assert sum("index carried from step to step / now" in name for name in what) == 2, "each change, for both blocks"
    assert "numbers mean nothing" in done.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so():
    done = run()
    assert (done.returncode, done.stdout) == (2, "")
    assert "--dry-run" in done.stderr
