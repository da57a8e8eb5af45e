"""Processes that end when the process that started them has ended, whatever ended it: no signal need be caught.

`dbsp_start.parents PARENT COMMAND…`, run as a module, becomes a command that starts ranks, and that ends with PARENT:
it is sent SIGTERM then, at which torchrun ends its ranks.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from dbsp_start.module import module_command

__all__ = ["LAUNCHER", "end_with_parent", "with_parent"]

LAUNCHER = "DBSP_LAUNCHER"
"""Environment variable of ranks: the process number of their torchrun."""

_PR_SET_PDEATHSIG = 1
_LOOK_S = 1.0


def with_parent(command: Sequence[str]) -> list[str]:
    """The command line that runs `command` for as long as the calling thread lives, which must wait for it."""
    return [sys.executable, *module_command("dbsp_start.parents", str(os.getpid())), *command]


def end_with_parent(
    parent: int | None = None, by: signal.Signals = signal.SIGKILL, *, starter_waits: bool = False
) -> None:
    """Has this process sent a signal when its parent ends, or at once where the parent has ended already.

    Args:
        parent: The parent's number as another process knows it: this one may begin after its parent's end.
        starter_waits: Whether the thread that started this process is known to wait for it, whichever thread it is.
    """
    present = os.getppid()
    if not ((starter_waits or _by_main_thread(present)) and _ask_the_kernel(by)):
        threading.Thread(target=_watch, args=(present, by), daemon=True).start()
    if os.getppid() != present or (parent is not None and parent != present and not _exists(parent)):
        os.kill(os.getpid(), by)


def _by_main_thread(parent: int) -> bool:
    """True where the parent's main thread is known to have started this process; it lives as long as its process."""
    try:
        children = Path(f"/proc/{parent}/task/{parent}/children").read_text(encoding="utf-8")
    except OSError:
        return False
    return str(os.getpid()) in children.split()


def _ask_the_kernel(by: signal.Signals) -> bool:
    """Has Linux send a signal when the thread that started this process ends. The request outlives `exec`.

    That may be before the thread's process ends.
    """
    if sys.platform != "linux":
        return False
    try:
        return bool(ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(by), 0, 0, 0) == 0)
    except (OSError, AttributeError):
        return False


def _watch(parent: int, by: signal.Signals) -> None:
    """Waits until this process has another parent, as an orphan gets, where the kernel cannot be asked."""
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


if __name__ == "__main__":
    os.environ[LAUNCHER] = str(os.getpid())  # which `exec` keeps
    end_with_parent(int(sys.argv[1]), by=signal.SIGTERM, starter_waits=True)
    os.execvp(sys.argv[2], sys.argv[2:])
