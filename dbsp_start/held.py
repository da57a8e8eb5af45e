"""`python -m dbsp_start.held PARENT COMMAND…`: becomes a command that starts ranks, and that ends with its parent.

torchrun is told to end, as by hand, and so ends its ranks.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence

from dbsp_start.parents import LAUNCHER, end_with_parent

__all__ = ["held"]


def held(command: Sequence[str]) -> list[str]:
    """The command line that runs `command` for as long as this thread is there, which must wait for it."""
    return [sys.executable, "-m", "dbsp_start.held", str(os.getpid()), *command]


if __name__ == "__main__":
    os.environ[LAUNCHER] = str(os.getpid())  # which `exec` keeps
    end_with_parent(int(sys.argv[1]), by=signal.SIGTERM, starter_waits=True)
    os.execvp(sys.argv[2], sys.argv[2:])
