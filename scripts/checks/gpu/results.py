"""Results of the GPU suite: rows, cases, their outcomes, and the one file that keeps them. Imports no torch."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

RESULTS, LOGS = "results.json", "logs.txt"


@dataclass(frozen=True)
class Row:
    """A check or a measurement."""

    what: str
    value: float
    unit: str = ""
    limit: float | None = None  # largest value that is correct, or None for a measurement
    goal: str = ""  # "≥ 0.75" or "≤ 1.05" for a measurement with a goal, else ""

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
    """One unit of the suite: `run` yields rows, each of which is kept as soon as it is there."""

    name: str
    run: Callable[[], Iterable[Row]]
    limit_s: float = 60.0  # seconds after which it counts as slow, and its process is ended
    alone: bool = False  # true if it is timed, so that nothing else may run


class Key(NamedTuple):
    """Names a case among those of all parts."""

    part: str
    case: str


@dataclass
class Outcome:
    """Outcome of a case."""

    state: str  # "ended"; "failed", for it raised or ended its process; "skipped"; "slow", for it was cut off
    sources: str  # `sources_fingerprint` of the run
    seconds: float = 0.0
    error: str = ""  # reason of a state other than "ended", on one line; tracebacks are in the log
    rows: list[Row] = field(default_factory=list)

    @property
    def correct(self) -> bool:
        """False for a failure or an incorrect row."""
        return self.state != "failed" and all(row.correct for row in self.rows)


class Results:
    """The outcomes of a folder, which are on disk as soon as they are known.

    Those of another device, or of a dry run where this is none, are dropped. Those of other sources are kept until
    their cases have run again.
    """

    def __init__(self, folder: Path, machine: Mapping[str, Any]) -> None:
        self.file, self.machine = folder / RESULTS, dict(machine)
        self.outcomes: dict[Key, Outcome] = {}
        if self.file.is_file():
            earlier, outcomes = read_results(self.file)
            if all(earlier.get(key) == self.machine[key] for key in ("devices", "how")):
                self.outcomes = outcomes

    @property
    def sources(self) -> str:
        """The fingerprint of the present sources."""
        return str(self.machine["sources"])

    def is_done(self, key: Key) -> bool:
        """Returns True if a case has an outcome under the present sources."""
        return key in self.outcomes and self.outcomes[key].sources == self.sources

    def is_older(self, key: Key) -> bool:
        """Returns True if a case was right under other sources: it can wait for those that were not."""
        return key in self.outcomes and not self.is_done(key) and self.outcomes[key].state in ("ended", "skipped")

    def record(self, key: Key, outcome: Outcome) -> None:
        """Keeps an outcome and writes the file, whole or not at all."""
        self.outcomes[key] = outcome
        cases = [{**key._asdict(), **asdict(of_case)} for key, of_case in self.outcomes.items()]
        content = json.dumps({"machine": self.machine, "cases": cases}, indent=1) + "\n"
        unfinished = self.file.with_suffix(".part")
        unfinished.write_text(content, encoding="utf-8")
        os.replace(unfinished, self.file)


def read_results(file: Path) -> tuple[dict[str, Any], dict[Key, Outcome]]:
    """Reads a file of `Results`: the description of the machine, and the outcomes."""
    content = json.loads(file.read_text(encoding="utf-8"))
    outcomes = {}
    for case in content["cases"]:
        key = Key(case.pop("part"), case.pop("case"))
        outcomes[key] = Outcome(**{**case, "rows": [Row(**row) for row in case["rows"]]})
    return content["machine"], outcomes
