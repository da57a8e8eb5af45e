"""Processes that a run has left behind: found by a variable that all of them inherited, and killed."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

__all__ = ["RUN", "kill_orphans"]

RUN = "DBSP_RUN"
"""Environment variable of everything that one run starts: the run's name, like no other's."""

_TRIES, _PAUSE_S = 100, 0.05


def kill_orphans(run: str) -> None:
    """Returns once no process of this run is there, or none that can be ended. Needs /proc; elsewhere, nothing.

    A rank that its torchrun has left is in a session of its own: nothing else leads to it.
    """
    mark = f"{RUN}={run}".encode()
    for _ in range(_TRIES):
        left = False
        for path in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):  # it has ended meanwhile, or is another user's; a zombie has none
                if mark in path.read_bytes().split(b"\0"):
                    left = True
                    os.kill(int(path.parent.name), signal.SIGKILL)
        if not left:
            return
        time.sleep(_PAUSE_S)
