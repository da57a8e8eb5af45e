"""Misbehaviour of processes, which the stress tests must find."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from scripts.checks.stress.faults.fault_injection import fire


def misbehave(how: str, number: int, folder: Path) -> None:
    if number == 0:  # as in a case: one process alone leaves the sign of it
        fire("go on", folder)
        HOW[how]()
    sys.exit("RuntimeError: injected: an error that is expected")


def _leave_a_file() -> None:
    tempfile.mkstemp()


def _leave_shared_memory() -> None:
    Path("/dev/shm/left").touch()


def _leave_an_orphan() -> None:
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])


def _say_something_else() -> None:
    sys.exit("RuntimeError: Connection closed by peer")


HOW = {
    "nothing": lambda: None,
    "a file": _leave_a_file,
    "shared memory": _leave_shared_memory,
    "an orphan": _leave_an_orphan,
    "a hang": lambda: time.sleep(600),
    "too late": lambda: time.sleep(4),
    "an abort": os.abort,
    "a success": lambda: os._exit(0),
    "other words": _say_something_else,
}
