"""The table of balance says what docs/results/balanced.csv has."""

from __future__ import annotations

import re

import pytest

from tests.docs.results import of_balance
from tests.support.repository import ROOT

NAMES = ["", "before", "snake", "striped", "paper's Alg. 1", "moved", "db-SP", "moved", "planning"]


def table() -> list[list[str]]:
    """The cells of the table, with its names first."""
    lines = (ROOT / "docs" / "results" / "even.md").read_text(encoding="utf-8").splitlines()
    rows = [
        [cell.strip().replace("*", "") for cell in line.strip("|").split("|")]
        for line in lines
        if line.startswith("|")
    ]
    first = rows.index(NAMES)
    return [NAMES, *rows[first + 2 : first + 6]]


def counted(strategy: str, planner: str, layout: str) -> tuple[float, float, float]:
    """(ρ_s, the worst layer's, the share that moves) of one row of the results, for Wan2.1-14B."""
    row = of_balance(strategy, planner, layout)
    return float(row["rho"]), float(row["rho_max"]), float(row["moved"])


def numbers(cell: str) -> list[float]:
    return [float(one) for one in re.findall(r"[\d.]+", cell)]


@pytest.mark.parametrize("strategy", ["U8R1", "U4R2", "U2R4", "U1R8"])
def test_the_numbers_are_those_of_the_results(strategy):
    (row,) = (row for row in table() if row[0] == strategy)
    _, before, snake, striped, paper, paper_moved, ours, ours_moved, _ = map(numbers, row)
    columns = {
        ("contiguous", "contiguous"): before,
        ("snake", "contiguous"): snake,
        ("contiguous", "striped"): striped,
        ("paper", "contiguous"): paper,
        ("dbsp", "striped"): ours,
    }
    for (planner, layout), cell in columns.items():
        mean, worst, _ = counted(strategy, planner, layout)
        assert cell == pytest.approx([mean, worst], abs=0.00051), planner
    for planner, layout, cell, within in (
        ("paper", "contiguous", paper_moved, 0.51),
        ("dbsp", "striped", ours_moved, 0.051),
    ):
        assert cell == [pytest.approx(100 * counted(strategy, planner, layout)[2], abs=within)], planner
