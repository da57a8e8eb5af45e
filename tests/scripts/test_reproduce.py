"""The reproductions run, on few and coarse masks, and leave a CSV and a PNG."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from tests.support.programs import run_module

pytestmark = pytest.mark.long

KNAPFORMER = [
    ("wir", ["--sparse-draws", "1"]),
    ("streams", []),
    ("throughput", ["--measure"]),
    ("gamma", ["--lengths", "64,128,256,512"]),
]
MODELLED = {"fig3", "clusters"}


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("table1", ["--coarsen", "16"]),
        ("balanced", ["--coarsen", "16", "--presets", "wan2.1-t2v-14b"]),
        ("balanced", ["--coarsen", "16", "--presets", "wan2.1-t2v-14b", "--ways", "burst@contiguous"]),
        ("fig11", ["--planners", "paper"]),
        ("fig12", ["--coarsen", "16"]),
        ("fig3", ["--coarsen", "16"]),
        ("clusters", ["--coarsen", "16", "--tokens", "8192", "16384"]),
    ],
)
def test_reproduction(tmp_path, name, options):
    out = run(name, tmp_path, "--layers", "1", *options)
    label = "modelled" if name in MODELLED else "measured"
    assert f"{label}{', ' if name in MODELLED else ' on '}synthetic masks" in out
    rows = published(tmp_path / name)
    assert all(float(row.get("rho", 1)) >= 1 for row in rows)
    assert all(label in row["label"] for row in rows)


@pytest.mark.parametrize(("name", "options"), KNAPFORMER)
def test_reproduction_of_knapformer(tmp_path, name, options):
    run(f"knapformer.{name}", tmp_path, "--draws", "1", *options)
    rows = published(tmp_path / f"knapformer-{name}")
    assert all("drawn" in row["label"] or "measured on" in row["label"] for row in rows)
    if name == "wir":
        ours = [row for row in rows if row["balancer"] == "dbsp" and row["bags"] == "g8n4"]
        assert {row["mask"] for row in ours} == {"dense", "density 0.3"}
        assert all(float(row["worst"]) <= 1.005 and float(row["rho"]) <= 1.01 for row in ours)


def run(program: str, out: Path, *options: str) -> str:
    """What a program of scripts/reproduce prints, on one line."""
    done = run_module(f"scripts.reproduce.{program}", "--out", out, *options)
    assert done.returncode == 0, done.stderr
    return " ".join(done.stdout.split())


def published(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV that lies beside a picture."""
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    with path.with_suffix(".csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert rows
    return rows
