"""A command that is told to end cleans up first."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from typing import NoReturn

__all__ = ["end_cleanly_on_signals"]

_SIGNALS = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]


def end_cleanly_on_signals() -> None:
    """From now on SIGTERM and SIGHUP, of a terminal that was closed, raise SystemExit(128 + signal) once.

    A signal that was ignored when this process began, as with nohup, stays ignored.
    """
    terminals = [stream for stream in (1, 2) if os.isatty(stream)]

    def end(number: int, frame: object) -> NoReturn:
        for other in _SIGNALS:
            signal.signal(other, signal.SIG_IGN)  # cleaning up takes a bounded time, and must not be cut short
        if number != signal.SIGTERM:  # the terminal is gone, and fails whoever writes to it
            nowhere = os.open(os.devnull, os.O_WRONLY)
            for stream in terminals:
                with suppress(OSError):
                    os.dup2(nowhere, stream)
        raise SystemExit(128 + number)

    for number in _SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, end)
