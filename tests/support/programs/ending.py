"""The end of a process that was forked: an interpreter's, but for taking apart all that was imported.

A fork would copy all of it first, which takes seconds.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
from collections.abc import Callable
from types import TracebackType
from typing import NoReturn

_UNWRITTEN = 120


def run_to_its_end(main: Callable[[], object], hidden: str | None = None) -> NoReturn:
    """Calls `main`, and ends this process as the interpreter would then: exit code, words, threads, `atexit`.

    Args:
        hidden: The folder of files that tracebacks do not begin with.
    """
    code, interrupted = 1, False
    try:
        try:
            main()
            code = 0
        except SystemExit as stopped:
            code = _code_of(stopped)
        except BaseException as error:
            error = error.with_traceback(_from_outside(error.__traceback__, hidden))
            _show(error)
            interrupted = isinstance(error, KeyboardInterrupt)
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        try:
            for stream in (sys.stdout, sys.stderr):
                if stream is not None and not stream.closed:
                    stream.flush()
        except OSError as error:
            os.write(2, f"Exception ignored at the end: {type(error).__name__}: {error}\n".encode())
            code = _UNWRITTEN
        if interrupted:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
    finally:
        os._exit(code & 0xFF)


def _show(error: BaseException) -> None:
    try:
        sys.excepthook(type(error), error, error.__traceback__)
    except BaseException as fault:  # of the program's own hook
        sys.__excepthook__(type(fault), fault, fault.__traceback__)


def _code_of(stopped: SystemExit) -> int:
    if stopped.code is None or isinstance(stopped.code, int):
        return stopped.code or 0
    print(stopped.code, file=sys.stderr)
    return 1


def _from_outside(trace: TracebackType | None, hidden: str | None) -> TracebackType | None:
    while trace is not None and hidden is not None and trace.tb_frame.f_code.co_filename.startswith(hidden):
        trace = trace.tb_next
    return trace
