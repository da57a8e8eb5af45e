"""Damaged inputs of every kind: each must end in success or in one clear line."""

from __future__ import annotations

import os
import random
import tempfile
from functools import cache
from pathlib import Path

from scripts.checks.stress.frame import Outcome, Part
from scripts.checks.stress.fuzz.guard import Guard
from scripts.checks.stress.fuzz.inputs import draw_trial
from scripts.checks.stress.fuzz.originals import write_originals


class Fuzz(Part):
    """Inputs that a process of its own draws, by seed and number, and tries."""

    name = "fuzz"
    preloaded = ("tests.support.interpreter", "scripts.checks.stress.fuzz.fuzz_part")
    patience_s = 120.0  # ends what even the alarm cannot

    def __init__(self) -> None:
        self._work = tempfile.TemporaryDirectory()
        (self._originals, self._inputs) = (Path(self._work.name, name) for name in ("originals", "inputs"))
        self._originals.mkdir()
        write_originals(self._originals)

    def draw(self, seed: int, number: int) -> str:
        return f"{seed}:{number}"

    def explain(self, seed: int, number: int) -> str:
        return draw_trial(random.Random(self.draw(seed, number)), self._originals, self._inputs).what

    def outcome(self, case: str) -> Outcome:
        ((failure, seconds),) = self.ask(1, _try, case, self._originals, self._inputs)
        return Outcome(failure, {"cpu_s": round(seconds, 3)})


def _try(rank: int, world: int, case: str, originals: Path, folder: Path) -> tuple[str | None, float]:
    trial = draw_trial(random.Random(case), originals, folder)
    os.chdir(folder)
    return _guard(folder).try_out(trial.call)


@cache
def _guard(folder: Path) -> Guard:
    os.environ |= {"TMPDIR": str(folder), "MPLCONFIGDIR": str(folder.parent)}
    tempfile.tempdir = None
    return Guard(folder.parent)
