"""All that can go wrong, in every phase: all processes end, with one clear error, and nothing is left behind."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from scripts.checks.stress.faults.fault_grid import Case, case_of
from scripts.checks.stress.faults.fork_server import ForkServer
from scripts.checks.stress.faults.judging import LATE, message_about
from scripts.checks.stress.frame import Outcome

TOGETHER = 3
"""Cases under way at once: most of their time they wait."""
PRELOAD = "scripts.checks.stress.faults.library:preload"


class Faults:
    name = "faults"

    def __init__(self) -> None:
        self._server: ForkServer | None = None
        self._folder = Path()

    def run(self, seed: int, first: int) -> Iterator[Outcome]:
        try:
            while True:
                numbers = range(first, first + TOGETHER)
                for number, outcome in zip(numbers, self._some(seed, list(numbers)), strict=True):
                    if outcome.failure is not None and LATE in outcome.failure:
                        (outcome,) = self._some(seed, [number])  # alone: whether it was only short of a core
                    yield outcome
                first += TOGETHER
        finally:
            self._close()

    def repeat(self, seed: int, number: int) -> Outcome:
        try:
            return self._some(seed, [number])[0]
        finally:
            self._close()

    def explain(self, seed: int, number: int) -> str:
        return case_of(seed, number).title

    def _some(self, seed: int, numbers: list[int]) -> list[Outcome]:
        if self._server is None:
            self._folder = Path(tempfile.mkdtemp(prefix="dbsp-faults."))
            self._server = ForkServer(PRELOAD)
        cases = {number: case_of(seed, number) for number in numbers}
        folders = {number: Path(tempfile.mkdtemp(dir=self._folder)) / "case" for number in numbers}
        for number, case in cases.items():
            self._server.start(case.task, folders[number])
        return [self._outcome(number, cases[number], folders[number]) for number in numbers]

    def _outcome(self, number: int, case: Case, folder: Path) -> Outcome:
        assert self._server is not None
        ended = self._server.wait(folder)
        failure = message_about(ended, case.expected, case.task.limit_s)
        shutil.rmtree(folder.parent, ignore_errors=True)
        seconds = max(ended.seconds, default=0.0) if ended.fired else 0.0
        return Outcome(number, failure, {"seconds until all had ended": seconds})

    def _close(self) -> None:
        if self._server is not None:
            self._server.close()
            shutil.rmtree(self._folder, ignore_errors=True)
            self._server = None
