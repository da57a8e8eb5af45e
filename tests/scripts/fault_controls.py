"""Misbehaviour of processes, which the stress tests must find."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from scripts.checks.stress.faults.fault_injection import Injection, fire
from scripts.checks.stress.faults.programs import Values
from scripts.checks.stress.faults.rank_fault import RankFault


class Misbehaviour(RankFault):
    """Two processes that say what was raised in the second, of which the first misbehaves."""

    limit_s, after_s = 3.0, 8.0

    def __init__(self, how: str) -> None:
        super().__init__(how, "", Values(), processes=2, odd=1, how="failure", injection=Injection("raise", 1, ""))

    def main(self, number: int, folder: Path) -> None:
        if number == 0:  # as in a case: one process alone leaves the sign of it
            fire("go on", folder)
            HOW[self.title][0]()
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
