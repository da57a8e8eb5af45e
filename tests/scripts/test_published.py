"""Published times of sequence parallelism and the model's: the CSV has every row, and the page what it says."""

from __future__ import annotations

import itertools

import pytest

from scripts.reproduce import published
from tests.docs.results import rows
from tests.support.repository import ROOT

PAGE = (ROOT / "docs" / "latency-model.md").read_text(encoding="utf-8")


def tables() -> list[list[dict[str, str]]]:
    """Returns the rows of each published table."""
    groups = itertools.groupby(rows("published"), lambda row: (row["table"], row["machine"], row["video"]))
    return [list(group) for _, group in groups]


def test_the_first_table_is_what_the_model_says_today(monkeypatch, tmp_path):
    few = tmp_path / "few.csv"
    few.write_text("".join(published.TABLES.read_text(encoding="utf-8").splitlines(keepends=True)[:4]))
    monkeypatch.setattr(published, "TABLES", few)
    made = list(published.measure())
    assert [(one.gpus, one.strategy, one.halves) for one in made] == [(1, "U1R1", 1), (2, "U1R1", 2), (2, "U2R1", 1)]
    for one, kept in zip(made, rows("published"), strict=False):
        assert one.modelled_s == pytest.approx(float(kept["modelled_s"]), rel=1e-3)
        assert one.modelled_linear == pytest.approx(float(kept["modelled_linear"]), abs=1e-3)


def test_the_page_says_what_each_table_shows():
    for one, *more in tables():
        scaling = [float(row["linear"]) / float(row["modelled_linear"]) for row in more]
        error = f"{100 * float(one['error']):+.0f} %".replace("-", "−").replace("+0 %", "0 %")
        name = one["table"].rpartition(": ")[2] if "LightX2V" in one["table"] else one["table"]
        span = f"{min(scaling):.2f}–{max(scaling):.2f}" if len(more) > 1 else f"{scaling[0]:.2f}"
        (line,) = [
            line
            for line in PAGE.splitlines()
            if line.startswith(f"| {name} |") and f"| {one['machine']}, {one['video']} |" in line
        ]
        assert f"| {error} | {span} |" in line, (line, error, span)
