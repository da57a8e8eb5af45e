"""Frame of the stress tests: parts draw numbered cases, and a state file keeps the progress of each."""

from __future__ import annotations

import json
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dbsp_core.utils.files import write_atomically
from tests.support.workers import PRELOADED, SAFETY_NET_S, WorkerError, WorkerPool

SAVE_EVERY_S = 5.0
WORLDS = (2, 2, 3, 3, 4, 4, 5, 6, 7, 8)
"""Numbers of ranks to draw from, where more than a few take long."""


@dataclass(frozen=True)
class Outcome:
    """End of a case. failure: what is wrong, in one line, or None;  measure: numbers, of which the worst counts"""

    failure: str | None = None
    measure: Mapping[str, float] = field(default_factory=dict)


class Failed(Exception):
    """A failure of the processes that a case ran in, in one line."""


def in_one_line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:400]


class Part(ABC):
    """A kind of cases, each drawn from (seed, number) alone.

    Attributes:
        together: Number of cases that are judged at once.
        most_tries: Number of smaller variants of a failing case that are tried.
        preloaded: Modules that processes of `ask` have from their birth.
        patience_s: Time after which no answer of theirs is a hang.
    """

    name: str
    together = 1
    most_tries = 0
    preloaded: tuple[str, ...] = PRELOADED
    patience_s: float = SAFETY_NET_S
    _pool: WorkerPool | None = None

    @abstractmethod
    def draw(self, seed: int, number: int) -> Any:
        """Returns the same case for equal arguments, on every machine; `str` of it is one line."""

    def judged(self, cases: Sequence[Any]) -> Iterator[Outcome]:
        """Yields the outcome of each case, in their order."""
        for case in cases:
            try:
                yield self.outcome(case)
            except Failed as error:
                yield Outcome(str(error))

    def outcome(self, case: Any) -> Outcome:
        """Judges one case, where a part does not judge several at once. Raises Failed."""
        raise NotImplementedError

    def smaller(self, case: Any) -> Iterator[Any]:
        """Yields variants of a case that are simpler, the greatest steps first."""
        return iter(())

    def ask(self, world: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Returns function(rank, world, *args) by rank, of processes that stay until another world or a failure.

        Raises Failed.
        """
        if self._pool is None or self._pool.world != world:
            self.close()
            self._pool = WorkerPool(world, self.preloaded, self.patience_s)
        try:
            return self._pool.run(function, *args)
        except (WorkerError, EOFError, OSError) as error:
            self.close()
            raise Failed(in_one_line(error)) from error

    def close(self) -> None:
        """Ends the processes that cases run in, if there are any."""
        if self._pool is not None:
            self._pool.close()
        self._pool = None

    def run(self, seed: int, first: int) -> Iterator[Outcome]:
        """Yields outcomes of the cases `first`, `first` + 1 … without end. Closing the iterator ends processes."""
        try:
            while True:
                last = (first // self.together + 1) * self.together
                yield from self.judged([self.draw(seed, number) for number in range(first, last)])
                first = last
        finally:
            self.close()

    def repeat(self, seed: int, number: int) -> Outcome:
        """Judges one case by itself."""
        try:
            return self._alone(self.draw(seed, number))
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

    def _alone(self, case: Any) -> Outcome:
        (found,) = self.judged([case])
        return found


State = dict[str, Any]
"""Content of a state file, which is also what is printed as JSON: the seed, the numbers of each part by its name, and
of each failure the command and the case."""


def read_state(path: Path, seed: int | None) -> State:
    """Reads the state of this seed (None: of any), or makes a new one."""
    if path.is_file():
        state: State = json.loads(path.read_text(encoding="utf-8"))
        if seed in (None, state["seed"]) and "failures" in state:
            return state
    return {"seed": seed or 0, "parts": {}, "failures": []}


def run_part(part: Part, state: State, path: Path, seconds: float) -> None:
    """Runs cases of a part for so long, but at least one. Failures are printed at once, and kept in the state."""
    found = state["parts"].setdefault(part.name, {"cases": 0, "failures": 0, "worst": {}, "seconds": 0.0})
    start = saved = time.monotonic()
    before = found["seconds"]
    outcomes = part.run(state["seed"], found["cases"])
    try:
        for outcome in outcomes:
            number, now = found["cases"], time.monotonic()
            found |= {"cases": number + 1, "seconds": round(before + now - start, 1)}
            for name, value in outcome.measure.items():
                found["worst"][name] = max(value, found["worst"].get(name, value))
            if outcome.failure is not None:
                found["failures"] += 1
                how = f"scripts/campaign --case {part.name}:{state['seed']}:{number}"
                state["failures"].append(f"{how}   {outcome.failure}   {part.explain(state['seed'], number)}")
                print(state["failures"][-1], file=sys.stderr, flush=True)
            if now - saved > SAVE_EVERY_S or outcome.failure is not None:
                write_atomically(path, json.dumps(state) + "\n")
                saved = now
            if now - start > seconds:
                break
    finally:
        outcomes.close()  # type: ignore[attr-defined]
        write_atomically(path, json.dumps(state) + "\n")
