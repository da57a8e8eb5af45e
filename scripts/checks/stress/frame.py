"""Frame of the stress tests: parts draw numbered cases, and a state file keeps the progress of each."""

from __future__ import annotations

import json
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dbsp_core.utils.files import write_atomically
from tests.support.workers import PRELOADED, SAFETY_NET_S, WorkerError, WorkerPool

SAVE_EVERY_S = 5.0
WORLDS = (2, 2, 3, 3, 4, 4, 5, 6, 7, 8)
"""Numbers of ranks to draw from, where more than a few take long."""


@dataclass(frozen=True)
class Outcome:
    """One case's. failure: what is wrong, in one line, or None;  measure: numbers, of which the worst counts"""

    number: int
    failure: str | None = None
    measure: Mapping[str, float] = field(default_factory=dict)


class Part(ABC):
    """A kind of cases, each drawn from (seed, number) alone.

    Attributes:
        together: Number of cases that are judged at once.
        most_tries: Number of smaller variants of a failing case that are tried.
    """

    name: str
    together = 1
    most_tries = 0

    @abstractmethod
    def draw(self, seed: int, number: int) -> Any:
        """Returns the same case for equal arguments, on every machine; `str` of it is one line."""

    def judged(self, cases: Mapping[int, Any]) -> Iterator[Outcome]:
        """Yields the outcome of each case, by number, in their order."""
        for number, case in cases.items():
            yield self.outcome(number, case)

    def outcome(self, number: int, case: Any) -> Outcome:
        """Judges one case, where a part does not judge several at once."""
        raise NotImplementedError

    def smaller(self, case: Any) -> Iterator[Any]:
        """Yields variants of a case that are simpler, the greatest steps first."""
        return iter(())

    @abstractmethod
    def close(self) -> None:
        """Ends the processes that cases run in, if there are any."""

    def run(self, seed: int, first: int) -> Iterator[Outcome]:
        """Yields outcomes of the cases `first`, `first` + 1 … without end. Closing the iterator ends processes."""
        try:
            while True:
                last = (first // self.together + 1) * self.together
                yield from self.judged({number: self.draw(seed, number) for number in range(first, last)})
                first = last
        finally:
            self.close()

    def repeat(self, seed: int, number: int) -> Outcome:
        """Judges one case by itself."""
        try:
            return self._alone(self.draw(seed, number), number)
        finally:
            self.close()

    def explain(self, seed: int, number: int) -> str:
        """Returns a failing case in one line, or its smallest variant that still fails."""
        case, tries = self.draw(seed, number), 0
        try:
            found = self._alone(case).failure if self.most_tries else None
            left = self.smaller(case) if found and "Hang" not in found else iter(())
            while (one := next(left, None)) is not None and tries < self.most_tries:
                tries += 1
                if self._alone(one).failure:
                    case, left = one, self.smaller(one)
        finally:
            self.close()
        return str(case)

    def _alone(self, case: Any, number: int = 0) -> Outcome:
        return next(iter(self.judged({number: case})))


class Failed(Exception):
    """A failure of the processes that a case ran in, in one line."""

    @classmethod
    def by(cls, error: Exception) -> Failed:
        """Returns another error's type and message."""
        return cls(" ".join(f"{type(error).__name__}: {error}".split())[:400])


class Workers:
    """Processes of one world size: started when they are first asked, and again after a failure."""

    def __init__(self, preloaded: tuple[str, ...] = PRELOADED, patience_s: float = SAFETY_NET_S) -> None:
        self._pool: WorkerPool | None = None
        self._preloaded, self._patience_s = preloaded, patience_s

    def ask(self, world: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Returns function(rank, world, *args) by rank. Raises Failed."""
        if self._pool is None or self._pool.world != world:
            self.close()
            self._pool = WorkerPool(world, self._preloaded, self._patience_s)
        try:
            return self._pool.run(function, *args)
        except (WorkerError, EOFError, OSError) as error:
            self.close()
            raise Failed.by(error) from error

    def close(self) -> None:
        """Ends the processes."""
        if self._pool is not None:
            self._pool.close()
        self._pool = None


@dataclass
class Progress:
    """One part's.

    Attributes:
        next: Number of the next case.
        worst: The largest number so far, by name.
        failures: Command and case of each.
    """

    next: int = 0
    seconds: float = 0.0
    worst: dict[str, float] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)


@dataclass
class State:
    """Content of a state file."""

    seed: int
    parts: dict[str, Progress] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path, seed: int | None) -> State:
        """Reads the state of this seed (None: of any), or makes a new one."""
        if path.is_file():
            values = json.loads(path.read_text(encoding="utf-8"))
            if seed in (None, values["seed"]):
                return cls(values["seed"], {name: Progress(**one) for name, one in values["parts"].items()})
        return cls(seed or 0)

    def write(self, path: Path) -> None:
        """Replaces the file."""
        write_atomically(path, json.dumps(asdict(self)) + "\n")

    def summary(self) -> dict[str, Any]:
        """Returns the numbers of all parts, for JSON."""
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
    """Runs cases of a part for so long, but at least one. Failures are printed at once, and kept in the state."""
    progress = state.parts.setdefault(part.name, Progress())
    start = saved = time.monotonic()
    before = progress.seconds
    cases = part.run(state.seed, progress.next)
    try:
        for outcome in cases:
            now = time.monotonic()
            progress.next, progress.seconds = outcome.number + 1, before + now - start
            for name, value in outcome.measure.items():
                progress.worst[name] = max(value, progress.worst.get(name, value))
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
