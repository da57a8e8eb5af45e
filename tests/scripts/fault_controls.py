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
        HOW[how][0]()
    sys.exit("RuntimeError: injected: an error that is expected")


HOW = {
    "nothing": (lambda: None, None),
    "a file": (tempfile.mkstemp, "left behind: tmp/"),
    "shared memory": (Path("/dev/shm/left").touch, "left behind: /dev/shm/left"),
    "an orphan": (lambda: subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]), "an orphan: "),
    "a hang": (lambda: time.sleep(600), "process 0 hangs"),
    "too late": (lambda: time.sleep(4), "late: process 0 ended after "),
    "an abort": (os.abort, "rank 0 ends with -6"),
    "a success": (lambda: os._exit(0), "rank 0 ends with 0"),
    "other words": (
        lambda: sys.exit("RuntimeError: Connection closed by peer"),
        "rank 0 says 'RuntimeError: Connection closed by peer'",
    ),
}
"""What a process does, and what is found wrong with it."""
