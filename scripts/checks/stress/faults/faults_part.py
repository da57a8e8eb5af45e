"""Faults in every phase: all processes end, with one clear error, and nothing is left behind."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from scripts.checks.stress.faults.fault_grid import Case, case_of
from scripts.checks.stress.faults.fork_server import ForkServer
from scripts.checks.stress.faults.judging import LATE, message_about
from scripts.checks.stress.frame import Outcome, Part

PRELOAD = "scripts.checks.stress.faults.library:preload"


class Faults(Part):
    """Faults of processes that a server forks, three cases at once: most of their time they wait."""

    name = "faults"
    together = 3

    def __init__(self) -> None:
        self._server: ForkServer | None = None
        self._folder = Path()

    def draw(self, seed: int, number: int) -> Case:
        return case_of(seed, number)

    def judged(self, cases: Mapping[int, Case]) -> Iterator[Outcome]:
        """Yields outcomes; a case that is late runs once more alone: it may only have been short of a core."""
        if self._server is None:
            self._folder = Path(tempfile.mkdtemp(prefix="dbsp-faults."))
            self._server = ForkServer(PRELOAD)
        folders = {number: Path(tempfile.mkdtemp(dir=self._folder)) / "case" for number in cases}
        for number, case in cases.items():
            self._server.start(case.task, folders[number])
        outcomes = [self._outcome(number, case, folders[number]) for number, case in cases.items()]
        for outcome in outcomes:
            late = outcome.failure is not None and LATE in outcome.failure and len(cases) > 1
            yield self._alone(cases[outcome.number], outcome.number) if late else outcome

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
            shutil.rmtree(self._folder, ignore_errors=True)
            self._server = None

    def _outcome(self, number: int, case: Case, folder: Path) -> Outcome:
        assert self._server is not None
        ended = self._server.wait(folder)
        failure = message_about(ended, case.expected, case.task.limit_s)
        shutil.rmtree(folder.parent, ignore_errors=True)
        seconds = max(ended.seconds, default=0.0) if ended.fired else 0.0
        return Outcome(number, failure, {"seconds until all had ended": seconds})
