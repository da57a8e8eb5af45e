"""Damaged inputs of every kind: each must end in success or in one clear line."""

from __future__ import annotations

import multiprocessing
import os
import random
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from multiprocessing.connection import Connection
from pathlib import Path

from scripts.checks.stress.frame import Outcome, Part

PATIENCE_S = 120.0
"""Ends what even the alarm cannot."""


class Fuzz(Part):
    """Inputs that a process of its own draws, by seed and number, and tries."""

    name = "fuzz"

    def __init__(self) -> None:
        self._process: multiprocessing.process.BaseProcess | None = None
        self._pipe: Connection | None = None
        self._what = ""

    def draw(self, seed: int, number: int) -> tuple[int, int]:
        return seed, number

    def explain(self, seed: int, number: int) -> str:
        return self._what

    def judged(self, cases: Mapping[int, tuple[int, int]]) -> Iterator[Outcome]:
        for number, case in cases.items():
            yield self._outcome(number, case)

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._process = self._pipe = None

    def _outcome(self, number: int, case: tuple[int, int]) -> Outcome:
        if self._pipe is None:
            context = multiprocessing.get_context("spawn")
            self._pipe, theirs = context.Pipe()
            self._process = context.Process(target=_try_inputs, args=(theirs,), daemon=True)
            self._process.start()
            theirs.close()
        try:
            self._pipe.send(case)
            self._what = self._pipe.recv()
            if self._pipe.poll(PATIENCE_S):
                failure, seconds = self._pipe.recv()
                return Outcome(number, failure, {"cpu_s": round(seconds, 3)})
            failure = "it hangs"
        except (EOFError, OSError):
            failure = "its process died"
        self.close()
        return Outcome(number, failure)


def _try_inputs(pipe: Connection) -> None:
    """Tries inputs, in a folder of its own, until its pipe closes or it is killed."""
    from scripts.checks.stress.fuzz.guard import Guard
    from scripts.checks.stress.fuzz.inputs import draw_trial
    from scripts.checks.stress.fuzz.originals import make_originals
    from tests.support import interpreter  # noqa: F401  before anything else imports triton

    with tempfile.TemporaryDirectory() as work:
        originals = make_originals(Path(work))
        folder = Path(work, "inputs")
        folder.mkdir()
        os.environ |= {"TMPDIR": str(folder), "MPLCONFIGDIR": work}
        tempfile.tempdir = None
        guard = Guard(Path(work))
        while True:
            seed, number = pipe.recv()
            shutil.rmtree(folder)
            folder.mkdir()
            os.chdir(folder)
            trial = draw_trial(random.Random(f"{seed}:{number}"), originals, folder)
            pipe.send(trial.what)
            pipe.send(guard.try_out(trial))
