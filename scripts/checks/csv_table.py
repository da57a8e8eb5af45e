"""Tables of results as CSV files that are made in parts."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path


def update_table(
    path: Path,
    rows: Sequence[Mapping[str, object]],
    key: Sequence[str],
    order: Sequence[tuple[str, ...]] | None = None,
) -> None:
    """Writes rows into a CSV file, in which others stay.

    Args:
        path: The file, which need not exist.
        rows: At least one, all with the same columns.
        key: Columns that distinguish rows: a row of the file with the values of a new one gives way to it.
        order: Values of the key by which the file's rows are sorted, and without which they go; None: as they came.
    """
    table: dict[tuple[str, ...], Mapping[str, object]] = {}
    if path.is_file():
        with path.open(newline="", encoding="utf-8") as file:
            table = {tuple(row[name] for name in key): row for row in csv.DictReader(file)}
    table |= {tuple(str(row[name]) for name in key): row for row in rows}
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(table[key] for key in (table if order is None else order) if key in table)
