"""Damaged inputs of every kind: each must end in success or in one clear line."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import random
import resource
import signal
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dbsp_cli.cli import main
from dbsp_core.utils.errors import UserError
from dbsp_core.utils.process import ERROR
from scripts.checks.stress.frame import Failed, Outcome, Part, Workers
from scripts.checks.stress.fuzz.inputs import Trial, draw_trial
from scripts.checks.stress.fuzz.originals import write_originals

MOST_CPU_S = 5
MOST_BYTES = 2 << 30
_RUNS = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork", "socket.connect")
_WRITES = ("os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.chmod", "os.truncate")
PATIENCE_S = 120.0
"""Ends what even the alarm cannot."""
PRELOADED = ("tests.support.interpreter", "scripts.checks.stress.fuzz.fuzz_part")


class Fuzz(Part):
    """Inputs that a process of its own draws, by seed and number, and tries."""

    name = "fuzz"

    def __init__(self) -> None:
        self._workers = Workers(PRELOADED, PATIENCE_S)
        self._work = tempfile.TemporaryDirectory()
        (self._originals, self._inputs) = (Path(self._work.name, name) for name in ("originals", "inputs"))
        self._originals.mkdir()
        write_originals(self._originals)

    def draw(self, seed: int, number: int) -> str:
        return f"{seed}:{number}"

    def explain(self, seed: int, number: int) -> str:
        return draw_trial(random.Random(self.draw(seed, number)), self._originals, self._inputs).what

    def outcome(self, number: int, case: str) -> Outcome:
        try:
            ((failure, seconds),) = self._workers.ask(1, _try, case, self._originals, self._inputs)
        except Failed as error:
            return Outcome(number, str(error))
        return Outcome(number, failure, {"cpu_s": round(seconds, 3)})

    def close(self) -> None:
        self._workers.close()


def _try(rank: int, world: int, case: str, originals: Path, folder: Path) -> tuple[str | None, float]:
    trial = draw_trial(random.Random(case), originals, folder)
    os.chdir(folder)
    return _guard(folder).try_out(trial)


@functools.cache
def _guard(folder: Path) -> Guard:
    os.environ |= {"TMPDIR": str(folder), "MPLCONFIGDIR": str(folder.parent)}
    tempfile.tempdir = None
    return Guard(folder.parent)


class TooSlow(BaseException):
    """After `MOST_CPU_S` of the processor's time. Not an Exception, which readers may catch."""


class Guard:
    """Watches this process from now on; there is one in a process. folder: where inputs may write"""

    def __init__(self, folder: Path) -> None:
        self._inside = os.path.realpath(folder) + os.sep
        self._misdeeds: list[str] | None = None
        sys.addaudithook(self._audit)
        signal.signal(signal.SIGPROF, self._stop)
        used = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + MOST_BYTES, used + MOST_BYTES))

    def try_out(self, trial: Trial) -> tuple[str | None, float]:
        """Returns what is wrong or None, and seconds of the processor's time."""
        before = resource.getrusage(resource.RUSAGE_SELF).ru_utime
        self._misdeeds = []
        signal.setitimer(signal.ITIMER_PROF, MOST_CPU_S)
        try:
            failure = _command(trial.call) if isinstance(trial.call, list) else _call(trial.call)
        except TooSlow:
            failure = f"takes more than {MOST_CPU_S} s"
        except BaseException as error:
            frame = traceback.extract_tb(error.__traceback__)[-1]
            text = " ".join(f"{type(error).__name__}: {error}".split())
            failure = f"{text[:300]} ({frame.filename.rpartition('/')[2]}:{frame.lineno})"
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
            misdeeds, self._misdeeds = self._misdeeds, None
        seconds = resource.getrusage(resource.RUSAGE_SELF).ru_utime - before
        return "; ".join(misdeeds) or failure, seconds

    @staticmethod
    def _stop(*_: object) -> None:
        raise TooSlow

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self._misdeeds is None:
            return
        if event in _RUNS:
            self._misdeeds.append(f"it runs or calls {arguments!r}"[:300])
            raise PermissionError("an input may not run anything")
        if (
            event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        ) or event in _WRITES:
            self._require_inside(arguments[0])

    def _require_inside(self, path: Any) -> None:
        if not isinstance(path, (str, bytes, os.PathLike)):
            return
        where = os.path.realpath(os.fsdecode(path))
        if not where.startswith((self._inside, "/dev/null")) and self._misdeeds is not None:
            self._misdeeds.append(f"it writes to {where}")
            raise PermissionError("an input may not write elsewhere")


def _call(function: Callable[[], object]) -> str | None:
    try:
        function()
    except (UserError, OSError) as error:
        return "its message has several lines" if len(str(error).splitlines()) > 1 else None
    return None


def _command(words: list[str]) -> str | None:
    out, err = io.StringIO(), io.StringIO()
    sys.argv = ["dbsp", *words]
    code: object = None
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of libraries: they are no part of what a user reads of us
        try:
            main()
        except SystemExit as stopped:
            code = stopped.code
    if code == 2:
        lines = err.getvalue().splitlines()
        if sum(line.startswith(ERROR) for line in lines) == 1 and lines[-1].startswith(ERROR):
            return None
        return f"exit code 2 with {err.getvalue()[-300:]!r}"
    return None if code in (0, None) else f"exit code {code} with {err.getvalue()[-300:]!r}"
