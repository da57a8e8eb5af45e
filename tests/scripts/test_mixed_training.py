"""`scripts/bench/mixed_training.py` runs every way on real ranks, which all have the same gradients but padding."""

from __future__ import annotations

import csv
import os
import subprocess
import sys

from repository import ROOT

OPTIONS = ("--ranks", "2", "--rounds", "1", "--masks", "sparge", "--mix", "5x48x64,2*1x48x64+1x32x48")


def test_every_way_is_measured(tmp_path):
    path = os.pathsep.join([str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, str(ROOT / "scripts" / "bench" / "mixed_training.py"), *OPTIONS]
    folders = ("--work", str(tmp_path), "--out", str(tmp_path))
    done = subprocess.run(
        [*command, *folders], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path}, timeout=300
    )
    assert done.returncode == 0, done.stderr
    with (tmp_path / "mixed-training.csv").open() as file:
        rows = list(csv.DictReader(file))
    ways = ["padded to the longest", "one loader a rank", *(f"KnapFormer {bags}" for bags in ("g1n2", "g2n1"))]
    assert [row["way"] for row in rows] == [*ways, "rows over all ranks"]
    assert all(float(row["wir"]) >= float(row["imbalance"]) >= 1 for row in rows)
    assert rows[-1]["core_ratio"] == rows[-1]["wall_ratio"] == "1.0"
    padded, *others = (float(row["gradients_differ"]) for row in rows)
    assert max(others) <= 1e-5 < padded
    assert all(row["label"].startswith("measured on a CPU, 2 gloo ranks") for row in rows)
