"""A command that is told to end does so by way of what must be cleaned up."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from typing import NoReturn

__all__ = ["end_cleanly_on_signals"]

_SIGNALS = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]


def end_cleanly_on_signals() -> None:
    """From now on SIGTERM and SIGHUP, of a terminal that was closed, raise SystemExit(128 + signal) once.

    What was ignored when this process began, as nohup has it, stays ignored.
    """
    terminals = [stream for stream in (1, 2) if _is_terminal(stream)]

    def end(number: int, frame: object) -> NoReturn:
        for other in _SIGNALS:
            signal.signal(other, signal.SIG_IGN)  # the cleaning up is bounded, and is not to be cut short
        if number != signal.SIGTERM:
            _write_nowhere(terminals)
        raise SystemExit(128 + number)

    for number in _SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, end)


def _is_terminal(stream: int) -> bool:
    try:
        return os.isatty(stream)
    except OSError:
        return False


def _write_nowhere(streams: list[int]) -> None:
    """A terminal that is gone fails whoever writes to it."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in streams:
        with suppress(OSError):
            os.dup2(nowhere, stream)
    os.close(nowhere)
