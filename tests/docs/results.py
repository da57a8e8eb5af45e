"""Rows of docs/results, for tests of the pages that cite them, and tables of pages."""

from __future__ import annotations

import csv

from tests.support.repository import ROOT


def rows(name: str, **wanted: str) -> list[dict[str, str]]:
    """Returns the rows of NAME.csv with the values that are wanted."""
    with (ROOT / "docs" / "results" / f"{name}.csv").open(encoding="utf-8") as file:
        return [row for row in csv.DictReader(file) if all(row[key] == value for key, value in wanted.items())]


def table(page: str, header: str) -> list[list[str]]:
    """Returns the cells of a page's table, without its header's line, which begins so, and without bold."""
    lines = (ROOT / page).read_text(encoding="utf-8").splitlines()
    (first,) = [number for number, line in enumerate(lines) if line.startswith(header)]
    found = []
    for line in lines[first + 2 :]:
        if not line.startswith("|"):
            break
        found.append([cell.strip(" *") for cell in line.replace("**", "").strip("|").split("|")])
    return found
