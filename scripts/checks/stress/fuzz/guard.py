"""Guard of a process that tries inputs: limits of time, of memory, and of what they may do."""

from __future__ import annotations

import contextlib
import io
import os
import resource
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dbsp_cli.cli import main
from dbsp_core.utils.errors import UserError
from dbsp_core.utils.process import ERROR
from scripts.checks.stress.frame import in_one_line

MOST_CPU_S = 5
MOST_BYTES = 2 << 30
_RUNS = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork", "socket.connect")
_WRITES = ("os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.chmod", "os.truncate")


class TooSlow(BaseException):
    """End of a trial after `MOST_CPU_S` of the processor's time. Not an Exception, which readers may catch."""


class Guard:
    """Watch on this process from now on; there is one in a process. folder: where inputs may write"""

    def __init__(self, folder: Path) -> None:
        self._inside = os.path.realpath(folder) + os.sep
        self._misdeeds: list[str] | None = None
        sys.addaudithook(self._audit)
        signal.signal(signal.SIGPROF, self._stop)
        used = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + MOST_BYTES, used + MOST_BYTES))

    def try_out(self, call: Callable[[], object] | list[str]) -> tuple[str | None, float]:
        """Returns what is wrong or None, and seconds of the processor's time. call: a function, or words of `dbsp`"""
        before = time.process_time()
        self._misdeeds = []
        signal.setitimer(signal.ITIMER_PROF, MOST_CPU_S)
        try:
            failure = _message_of_command(call) if isinstance(call, list) else _message_of(call)
        except TooSlow:
            failure = f"takes more than {MOST_CPU_S} s"
        except BaseException as error:
            frame = traceback.extract_tb(error.__traceback__)[-1]
            failure = f"{in_one_line(error)} ({frame.filename.rpartition('/')[2]}:{frame.lineno})"
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
            misdeeds, self._misdeeds = self._misdeeds, None
        return "; ".join(misdeeds) or failure, time.process_time() - before

    @staticmethod
    def _stop(*_: object) -> None:
        raise TooSlow

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self._misdeeds is None:
            return
        if event in _RUNS:
            self._misdeeds.append(f"it runs or calls {arguments!r}"[:300])
            raise PermissionError("an input may not run anything")
        opens = event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        if (opens or event in _WRITES) and isinstance(arguments[0], (str, bytes, os.PathLike)):
            where = os.path.realpath(os.fsdecode(arguments[0]))
            if not where.startswith((self._inside, "/dev/null")):
                self._misdeeds.append(f"it writes to {where}")
                raise PermissionError("an input may not write elsewhere")


def _message_of(function: Callable[[], object]) -> str | None:
    try:
        function()
    except (UserError, OSError) as error:
        return "its message has several lines" if len(str(error).splitlines()) > 1 else None
    return None


def _message_of_command(words: list[str]) -> str | None:
    err, code = io.StringIO(), None
    sys.argv = ["dbsp", *words]
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(err), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of libraries: they are no part of what a user reads of us
        try:
            main()
        except SystemExit as stopped:
            code = stopped.code
    errors = [line.startswith(ERROR) for line in err.getvalue().splitlines()]
    fine = code in (0, None) or (code == 2 and errors[-1:] == [True] and sum(errors) == 1)
    return None if fine else f"exit code {code} with {err.getvalue()[-300:]!r}"
