"""Processes that a run has left behind: found by a variable that all of them inherited, and killed."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

__all__ = ["RUN", "kill_orphans", "signal_of_run"]

RUN = "DBSP_RUN"
"""Environment variable of everything that one run starts: the run's name, like no other's."""

_TRIES, _PAUSE_S = 100, 0.05


def kill_orphans(run: str) -> None:
    """Returns once no process of this run is there, or none that can be ended. Needs /proc; elsewhere, nothing.

    A rank that its torchrun has left is in a session of its own: nothing else leads to it.
    """
    for _ in range(_TRIES):
        processes = (int(path.parent.name) for path in Path("/proc").glob("[0-9]*/environ"))
        if not sum(signal_of_run(process, run, signal.SIGKILL) for process in processes):
            return
        time.sleep(_PAUSE_S)


def signal_of_run(process: int, run: str, number: int) -> bool:
    """Sends a process a signal if it is of this run. returns: whether it is"""
    with suppress(OSError):  # it has ended meanwhile, or is another user's; a zombie has none
        if f"{RUN}={run}".encode() in Path(f"/proc/{process}/environ").read_bytes().split(b"\0"):
            os.kill(process, number)
            return True
    return False
