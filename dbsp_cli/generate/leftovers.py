"""Processes that a run has left behind: found by a variable that all of them inherited, ended without asking."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

__all__ = ["RUN", "end_leftovers"]

RUN = "DBSP_RUN"
"""Environment variable of everything that one run starts: the run's name, like no other's."""

_PROCESSES = Path("/proc")
_TRIES = 100
_PAUSE_S = 0.05


def end_leftovers(run: str) -> None:
    """Returns once no process of this run is there, or none that can be ended. Needs /proc; elsewhere, nothing.

    A rank that its torchrun has left is in a session of its own: nothing else leads to it.
    """
    for _ in range(_TRIES):
        left = _processes_of(run)
        for process in left:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(process, signal.SIGKILL)
        if not left:
            return
        time.sleep(_PAUSE_S)


def _processes_of(run: str) -> list[int]:
    mark, found = f"{RUN}={run}".encode(), []
    for path in _PROCESSES.glob("[0-9]*/environ"):
        with suppress(OSError):  # it has ended meanwhile, or is another user's; one that waits to be buried has none
            if mark in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
    return found
