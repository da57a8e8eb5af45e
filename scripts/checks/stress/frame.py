"""The campaign's frame: parts draw numbered cases, and a state file says how far each has come."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from dbsp_core.utils.files import write_atomically

SAVE_EVERY_S = 5.0
WORLDS = (2, 2, 3, 3, 4, 4, 5, 6, 7, 8)
"""Numbers of ranks to draw from, where more than a few take long."""


@dataclass(frozen=True)
class Outcome:
    """Of one case. failure: what is wrong, in one line, or None;  measure: numbers, of which the worst counts"""

    number: int
    failure: str | None = None
    measure: Mapping[str, float] = field(default_factory=dict)


class Part(Protocol):
    """A kind of cases. Each is drawn from (seed, number) alone."""

    name: str

    def run(self, seed: int, first: int) -> Iterator[Outcome]:
        """Cases `first`, `first` + 1 … in this order, without end. Closing the iterator ends its processes."""
        ...

    def repeat(self, seed: int, number: int) -> Outcome:
        """One case by itself."""
        ...

    def explain(self, seed: int, number: int) -> str:
        """What the latest case is, or where it can be made smaller, the smallest that still fails. One line."""
        ...


@dataclass
class Progress:
    """Of one part. next: number of the next case;  worst: by name, the largest number so far"""

    next: int = 0
    seconds: float = 0.0
    worst: dict[str, float] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    """How to repeat each."""

    def add(self, outcome: Outcome) -> None:
        self.next = outcome.number + 1
        for name, value in outcome.measure.items():
            self.worst[name] = max(value, self.worst.get(name, value))


@dataclass
class State:
    """What a state file holds."""

    seed: int
    parts: dict[str, Progress] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path, seed: int | None) -> State:
        """The state of this seed (None: of any), or a new one."""
        if path.is_file():
            values = json.loads(path.read_text(encoding="utf-8"))
            if seed in (None, values["seed"]):
                return cls(values["seed"], {name: Progress(**one) for name, one in values["parts"].items()})
        return cls(seed or 0)

    def write(self, path: Path) -> None:
        write_atomically(path, json.dumps(asdict(self)) + "\n")

    def summary(self) -> dict[str, Any]:
        parts = {
            name: {
                "cases": one.next,
                "failures": len(one.failures),
                "worst": one.worst,
                "seconds": round(one.seconds, 1),
            }
            for name, one in self.parts.items()
        }
        failures = [how for one in self.parts.values() for how in one.failures]
        return {"seed": self.seed, "parts": parts, "failures": failures}


def run_part(part: Part, state: State, path: Path, seconds: float) -> None:
    """Runs cases of a part for so long, but at least one. Failures are given at once, and kept in the state."""
    progress = state.parts.setdefault(part.name, Progress())
    start = saved = time.monotonic()
    before = progress.seconds
    cases = part.run(state.seed, progress.next)
    try:
        for outcome in cases:
            progress.add(outcome)
            now = time.monotonic()
            progress.seconds = before + now - start
            if outcome.failure is not None:
                how = f"scripts/campaign --case {part.name}:{state.seed}:{outcome.number}"
                progress.failures.append(f"{how}   {outcome.failure}   {part.explain(state.seed, outcome.number)}")
                print(progress.failures[-1], file=sys.stderr, flush=True)
            if now - saved > SAVE_EVERY_S or outcome.failure is not None:
                state.write(path)
                saved = now
            if now - start > seconds:
                break
    finally:
        cases.close()  # type: ignore[attr-defined]
        state.write(path)
