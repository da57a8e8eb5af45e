"""The reproductions run, on few and coarse masks, and leave a CSV and a PNG."""

from __future__ import annotations

import csv
import os
import subprocess
import sys

import pytest

from repository import ROOT

MODELLED = {"fig3", "fig8", "fig9", "fig10", "modelled/clusters"}
SCRIPTS = ROOT / "scripts" / "reproduce"


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("table1", ["--coarsen", "16"]),
        ("balanced", ["--coarsen", "16", "--presets", "wan2.1-t2v-14b"]),
        ("fig11", ["--planners", "paper"]),
        ("fig12", ["--coarsen", "16"]),
        ("fig3", ["--coarsen", "16"]),
        ("fig8", ["--coarsen", "16", "--models", "cogvideox1.5-5b"]),
        ("fig9", ["--coarsen", "16"]),
        ("fig10", ["--coarsen", "16", "--models", "wan2.1-t2v-14b"]),
        ("modelled/clusters", ["--coarsen", "16", "--tokens", "8192", "16384"]),
    ],
)
def test_reproduction(tmp_path, name, options):
    script = SCRIPTS / f"{name}.py"
    assert os.access(script, os.X_OK)
    command = [sys.executable, str(script), "--layers", "1", "--out", str(tmp_path), *options]
    path = os.pathsep.join([str(SCRIPTS.parents[1]), str(SCRIPTS.parents[1] / "kernels")])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([path, os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    label = "modelled" if name in MODELLED else "measured"
    assert f"{label}{', ' if name in MODELLED else ' on '}synthetic masks" in " ".join(done.stdout.split())
    assert (tmp_path / f"{script.stem}.png").read_bytes().startswith(b"\x89PNG")
    with (tmp_path / f"{script.stem}.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert rows
    assert all(float(row.get("rho", 1)) >= 1 for row in rows)
    assert all(label in row["label"] for row in rows)
