"""The reproductions run, on few and coarse masks, and leave a CSV and a PNG."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.programs import output_of

pytestmark = pytest.mark.long

OTHER_OPTIONS = [
    ("throughput", ["--measure"]),
    ("gamma", ["--lengths", "64,128,256,512"]),
]
"""Programs of KnapFormer whose figures depend on the machine, or do with these options."""
CURRENT = {
    "balanced": [],
    "clusters": [],
    "fig3": [],
    "fig8": [],
    "fig9": [],
    "fig10": [],
    "fig11": ["--planners", "paper", "dbsp"],
    "fig12": [],
    "knapformer.wir": [],
    "knapformer.streams": [],
    "knapformer.throughput": [],
    "table1": [],
}
"""Programs whose figures are counted or modelled, with the options that docs/results/evidence.yaml names."""
RESULTS = Path(__file__).parents[2] / "docs" / "results"
CURRENT_JSON = {
    "planner": ("planner", []),
    "sequence-planning": ("sequences.sharing", []),
}
"""The same of scripts/bench, by file: program and options."""


@pytest.mark.parametrize("name", CURRENT)
def test_what_is_published_is_what_the_program_makes_today(tmp_path, name):
    run(name, tmp_path, *CURRENT[name])
    file = name.replace(".", "-")
    assert published(tmp_path / file) == published(RESULTS / file)


def test_minimax_h3_is_current(tmp_path):
    run("h3", tmp_path)
    assert (tmp_path / "h3.csv").read_text() == (RESULTS / "h3.csv").read_text()


@pytest.mark.parametrize("name", CURRENT_JSON)
def test_what_is_counted_and_modelled_next_to_what_was_measured_is_current(name):
    program, options = CURRENT_JSON[name]
    made = json.loads(output_of(f"scripts.bench.{program}", "--json", *options, timeout=900))
    kept = json.loads((RESULTS / f"{name}.json").read_text())
    assert without_times(made) == without_times(kept)


@pytest.mark.parametrize(("name", "options"), OTHER_OPTIONS)
def test_reproduction_of_knapformer(tmp_path, name, options):
    run(f"knapformer.{name}", tmp_path, "--draws", "1", *options)
    rows = published(tmp_path / f"knapformer-{name}")
    assert all("drawn" in row["label"] or "measured on" in row["label"] for row in rows)


def run(program: str, out: Path, *options: str) -> None:
    output_of(f"scripts.reproduce.{program}", "--out", out, *options, timeout=900)


def without_times(found: Any) -> Any:
    """Returns what a program of scripts/bench has found, without milliseconds."""
    if isinstance(found, dict):
        return {name: without_times(value) for name, value in found.items() if not name.endswith("_ms")}
    return [without_times(value) for value in found] if isinstance(found, list) else found


def published(path: Path) -> list[dict[str, str]]:
    """Returns the rows of a CSV that lies next to a picture."""
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    with path.with_suffix(".csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert rows
    return rows
