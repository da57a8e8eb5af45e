"""The table of balance says what docs/results/balanced.csv has."""

from __future__ import annotations

import csv
import re

import pytest

from tests.support.repository import ROOT

NAMES = ["", "before", "striped", "paper's Alg. 1", "moved", "db-SP", "moved", "planning"]


def table() -> list[list[str]]:
    """The cells of the table, with its names first."""
    lines = (ROOT / "docs" / "results" / "even.md").read_text(encoding="utf-8").splitlines()
    rows = [[cell.strip(" *") for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    first = rows.index(NAMES)
    return [NAMES, *rows[first + 2 : first + 6]]


def counted(strategy: str, planner: str, layout: str) -> tuple[float, float]:
    """(ρ_s, the share that moves) of one row of the results, for Wan2.1-14B."""
    with (ROOT / "docs" / "results" / "balanced.csv").open(encoding="utf-8") as file:
        wanted = ("wan2.1-t2v-14b", strategy, planner, layout)
        (row,) = (
            row
            for row in csv.DictReader(file)
            if (row["preset"], row["strategy"], row["planner"], row["layout"]) == wanted
        )
    return float(row["rho"]), float(row["moved"])


def number(cell: str) -> float:
    return float(re.sub("[ %]", "", cell))


@pytest.mark.parametrize("strategy", ["U8R1", "U4R2", "U2R4", "U1R8"])
def test_the_numbers_are_those_of_the_results(strategy):
    (row,) = (row for row in table() if row[0] == strategy)
    _, before, striped, paper, paper_moved, ours, ours_moved, _ = row
    rounded = pytest.approx
    assert number(before) == rounded(counted(strategy, "contiguous", "contiguous")[0], abs=0.00051)
    assert number(striped) == rounded(counted(strategy, "contiguous", "striped")[0], abs=0.00051)
    rho, moved = counted(strategy, "paper", "contiguous")
    assert (number(paper), number(paper_moved)) == (rounded(rho, abs=0.00051), rounded(100 * moved, abs=0.51))
    rho, moved = counted(strategy, "dbsp", "striped")
    assert (number(ours), number(ours_moved)) == (rounded(rho, abs=0.00051), rounded(100 * moved, abs=0.051))
