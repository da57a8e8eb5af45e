"""Results of the GPU suite as JSON lines: one file per step, each line on disk before the next thing is done."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[3]
SOURCES = ("dbsp_*", "kernels", "scripts/checks/gpu", "tests/support", "tests/kernels")
MOST_STARTS = 3
"""Times that a case is begun that has not ended."""


@dataclass(frozen=True)
class Row:
    """A finding.

    Attributes:
        limit: Largest value that is correct, or None for a measurement.
        goal: "≥ 0.75" or "≤ 1.05" for a measurement with a goal, else "".
    """

    what: str
    value: float
    unit: str = ""
    limit: float | None = None
    goal: str = ""

    @property
    def correct(self) -> bool:
        """False for a value above its limit, or NaN."""
        return self.limit is None or (math.isfinite(self.value) and self.value <= self.limit)

    @property
    def met(self) -> bool | None:
        """True if the goal is met, or None if there is none."""
        if not self.goal:
            return None
        sign, bound = self.goal.split()
        return self.value >= float(bound) if sign == "≥" else self.value <= float(bound)


class Skipped(Exception):
    """Raised by a case that cannot be run on this machine, with the reason."""


@dataclass(frozen=True)
class Case:
    """One unit of a step: `run` yields rows, and is passed over where it was run before.

    Attributes:
        limit_s: Seconds after which its process is ended.
    """

    name: str
    run: Callable[[], Iterable[Row]]
    limit_s: float = 150.0


@dataclass
class Outcome:
    """Entries of a journal about a case: `state` is open, ended, failed or skipped."""

    starts: int = 0
    state: str = "open"
    rows: list[dict[str, Any]] = field(default_factory=list)
    error: dict[str, str] = field(default_factory=dict)
    pid: int = 0

    @property
    def correct(self) -> bool:
        """False for an exception or an incorrect row."""
        return self.state != "failed" and all(row["correct"] for row in self.rows)


@dataclass(frozen=True)
class Journal:
    """Appends to a step's files, one per folder, entries of one `stamp`: the same sources on the same device."""

    step: str
    folders: tuple[Path, ...]
    stamp: str

    def write(self, kind: str, case: str, **entry: Any) -> None:
        """Appends a line, and returns when it is on disk. Several processes may write to one file."""
        line = json.dumps({"kind": kind, "case": case, "pid": os.getpid(), "stamp": self.stamp} | entry)
        for folder in self.folders:
            with open(folder / f"{self.step}.jsonl", "a", encoding="utf-8") as file:
                file.write(line + "\n")
                file.flush()
                os.fsync(file.fileno())

    def row(self, case: str, row: Row) -> None:
        self.write("row", case, **asdict(row), correct=row.correct, met=row.met)

    def outcomes(self) -> dict[str, Outcome]:
        """Returns what is known of each case. Lines that were cut off are passed over."""
        found: dict[str, Outcome] = {}
        for entry in self._entries():
            outcome = found.setdefault(entry["case"], Outcome())
            kind = entry["kind"]
            if kind == "begun":
                outcome.starts, outcome.state, outcome.rows = outcome.starts + 1, "open", []
                outcome.pid = entry["pid"]
            elif kind == "row":
                outcome.rows.append(entry)
            else:
                outcome.state, outcome.error = kind, entry.get("error", {})
        return found

    def complete(self) -> bool:
        """Returns True if every case of the step has been run."""
        outcomes = self.outcomes()
        return "" in outcomes and all(outcome.state != "open" for outcome in outcomes.values())

    def _entries(self) -> Iterator[dict[str, Any]]:
        file = self.folders[0] / f"{self.step}.jsonl"
        for line in file.read_text(encoding="utf-8").splitlines() if file.is_file() else ():
            try:
                entry = json.loads(line)
            except ValueError:
                continue
            if entry.get("stamp") == self.stamp:
                yield entry


def sources_fingerprint() -> str:
    """Returns hexadecimal digits that change with any source of the suite; a lent machine may have no git."""
    digest = hashlib.sha256()
    files = (file for pattern in SOURCES for folder in REPO.glob(pattern) for file in folder.rglob("*"))
    for file in sorted(file for file in files if file.suffix in (".py", ".yaml")):
        digest.update(str(file.relative_to(REPO)).encode() + file.read_bytes())
    return digest.hexdigest()[:12]
