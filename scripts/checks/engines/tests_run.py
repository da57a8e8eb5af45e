"""Outcomes of an engine's tests when they last ran: rows of docs/results/engine-tests.csv, one per test function.

python -m scripts.checks.engines.tests_run ENGINE JUNIT.XML        in that engine's environment: scripts/engines test
"""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter, defaultdict
from importlib.metadata import version
from pathlib import Path

from scripts.checks.csv_table import update_table

RESULT = Path(__file__).parents[3] / "docs/results/engine-tests.csv"
OUTCOMES = {"failure": "failed", "error": "failed", "skipped": "skipped"}


def rows_of(engine: str, report: Path) -> list[dict[str, object]]:
    """Returns a row per test function of a report in JUnit's format: how many of its cases had which outcome."""
    counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for case in ElementTree.parse(report).iter("testcase"):
        outcome = next((OUTCOMES[part.tag] for part in case if part.tag in OUTCOMES), "passed")
        counts[case.attrib["name"].partition("[")[0]][outcome] += 1
    return [
        {"engine": engine, "version": version(engine), "test": name}
        | {outcome: found[outcome] for outcome in ("passed", "failed", "skipped")}
        for name, found in counts.items()
    ]


def main() -> None:
    engine, report = sys.argv[1:]
    update_table(RESULT, rows_of(engine, Path(report)), ("engine", "test"))


if __name__ == "__main__":
    main()
