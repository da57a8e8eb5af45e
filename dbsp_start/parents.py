"""Processes that end when the one that started them has ended, however that came about: no signal need be caught."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from pathlib import Path

__all__ = ["LAUNCHER", "end_with_parent"]

LAUNCHER = "DBSP_LAUNCHER"
"""Environment variable of ranks: the process number of their torchrun."""

_PR_SET_PDEATHSIG = 1
_LOOK_S = 1.0


def end_with_parent(
    parent: int | None = None, by: signal.Signals = signal.SIGKILL, *, starter_waits: bool = False
) -> None:
    """From now on this process is sent a signal once its parent has ended; at once where that has ended already.

    parent:        its number, where that is known from somewhere else than this process, which may have been too late
                   to ask
    starter_waits: whether the thread that started this process lives as long as it is needed, whichever it is
    """
    present = os.getppid()
    if not ((starter_waits or _by_main_thread(present)) and _ask_the_kernel(by)):
        threading.Thread(target=_watch, args=(present, by), daemon=True).start()
    if os.getppid() != present or (parent is not None and parent != present and not _exists(parent)):
        os.kill(os.getpid(), by)


def _by_main_thread(parent: int) -> bool:
    """Whether the parent's main thread, which lives as long as it does, has started this process, as far as known."""
    try:
        children = Path(f"/proc/{parent}/task/{parent}/children").read_text()
    except OSError:
        return False
    return str(os.getpid()) in children.split()


def _ask_the_kernel(by: signal.Signals) -> bool:
    """Linux sends a signal when the thread that started this process ends, at its process's end or before. Kept by
    `exec`."""
    if sys.platform != "linux":
        return False
    try:
        return bool(ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(by), 0, 0, 0) == 0)
    except (OSError, AttributeError):
        return False


def _watch(parent: int, by: signal.Signals) -> None:
    """Where the kernel can't be asked: an orphan gets another parent."""
    while os.getppid() == parent:
        time.sleep(_LOOK_S)
    os.kill(os.getpid(), by)


def _exists(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
