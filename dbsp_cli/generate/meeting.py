"""Where several nodes meet before ranks start, and what a user is told while they don't."""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Meeting"]

_PATIENCE_S = 20.0  # as long as it may take to start the command by hand on the next node
_NEVER_CAME = re.compile(r"\b(DistStoreError|DistNetworkError|RendezvousTimeoutError|RendezvousConnectionError)\b")


@dataclass(frozen=True)
class Meeting:
    """nodes: that come;  place: HOST:PORT;  seconds: for which a node waits for the others"""

    nodes: int
    place: str
    seconds: float

    @property
    def option(self) -> str:
        """torchrun's, for both of its ways to meet."""
        seconds = math.ceil(self.seconds)
        return "--rdzv-conf=" + ",".join(f"{name}={seconds}" for name in ("timeout", "join_timeout", "read_timeout"))

    @contextmanager
    def watched(self, ranks_folder: Path, tell: Callable[[str], object]) -> Iterator[None]:
        """Tells once, where ranks are long in starting, what is waited for. ranks_folder: torchrun's, for logs"""

        def look() -> None:
            if not _have_met(ranks_folder):
                missing = f"{self.nodes - 1} of {self.nodes}" if self.nodes == 2 else f"some of {self.nodes}"
                tell(f"waiting for {missing} nodes at {self.place}")

        timer = threading.Timer(_PATIENCE_S, look)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def complaint(self, ranks_folder: Path, said: str) -> str | None:
        """Why no rank was started, where that is because nodes did not meet. said: torchrun's last words"""
        if _have_met(ranks_folder):
            return None
        if "EADDRINUSE" in said:
            return f"the port of {self.place} is taken; give another one, the same on all nodes"
        if _NEVER_CAME.search(said):
            return (
                f"not all {self.nodes} nodes came to {self.place} within {self.seconds:g} s; start this command on "
                "each, see that they can reach that port, or have them wait longer with --timeout"
            )
        return None


def _have_met(ranks_folder: Path) -> bool:
    """torchrun makes folders for its ranks' output when it starts them."""
    return any(ranks_folder.rglob("attempt_*"))
