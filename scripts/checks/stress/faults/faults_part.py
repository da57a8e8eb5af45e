"""Faults in every phase: all processes end, with one clear error, and nothing is left behind."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from multiprocessing.process import BaseProcess
from pathlib import Path

from scripts.checks.stress.faults.fault_grid import Case, case_of
from scripts.checks.stress.faults.judging import LATE, message_about
from scripts.checks.stress.faults.keeper import start_keeper, wait_for
from scripts.checks.stress.frame import Outcome, Part

PRELOADED = (
    "tests.support.interpreter",  # before anything else imports triton
    "torch._dynamo",
    "diffusers.models.transformers.transformer_wan",
    "dbsp_cli.cli",
    "dbsp_cli.generate.videos",
    "scripts.checks.stress.faults.programs",
    "tests.support.models.tiny_transformers",
)
"""What every process has from its birth."""


class Faults(Part):
    """Faults of processes that are forked, three cases at once: most of their time they wait."""

    name = "faults"
    together = 3
    draw = staticmethod(case_of)

    def judged(self, cases: Mapping[int, Case]) -> Iterator[Outcome]:
        """Yields outcomes; a case that is late runs once more alone: it may only have been short of a core."""
        with tempfile.TemporaryDirectory(prefix="dbsp-faults.") as work:
            folders = {number: Path(work, str(number)) for number in cases}
            keepers = {number: start_keeper(case.task, folders[number], PRELOADED) for number, case in cases.items()}
            outcomes = [_outcome(number, case, keepers[number], folders[number]) for number, case in cases.items()]
        for outcome in outcomes:
            late = outcome.failure is not None and LATE in outcome.failure and len(cases) > 1
            yield self._alone(cases[outcome.number], outcome.number) if late else outcome

    def close(self) -> None: ...


def _outcome(number: int, case: Case, keeper: BaseProcess, folder: Path) -> Outcome:
    ended = wait_for(keeper, folder)
    failure = message_about(ended, case.expected, case.task.limit_s)
    seconds = max(ended.seconds, default=0.0) if ended.fired else 0.0
    return Outcome(number, failure, {"seconds until all had ended": seconds})
