"""Rows of docs/results, for tests of the pages that cite them."""

from __future__ import annotations

import csv

from tests.support.repository import ROOT


def rows(name: str, **wanted: str) -> list[dict[str, str]]:
    """Returns the rows of NAME.csv with the values that are wanted."""
    with (ROOT / "docs" / "results" / f"{name}.csv").open(encoding="utf-8") as file:
        return [row for row in csv.DictReader(file) if all(row[key] == value for key, value in wanted.items())]


def of_balance(strategy: str, planner: str, layout: str) -> dict[str, str]:
    """Returns the row of balanced.csv on one way to plan Wan2.1-14B's masks."""
    (row,) = rows("balanced", preset="wan2.1-t2v-14b", strategy=strategy, planner=planner, layout=layout)
    return row
