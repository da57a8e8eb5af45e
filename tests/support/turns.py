"""Threads that compute one at a time: those that all want Python's interpreter spend more time in handing it over."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

_PATIENCE_S = 0.03


class Turns:
    """One thread's turn at a time, to save time and not to order anything.

    A thread may wait in its turn for another that has none: after a moment, who waits for a turn goes on without.
    """

    def __init__(self) -> None:
        self._free = threading.Semaphore(1)
        self._mine = threading.local()

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Takes turns within the block."""
        self._take()
        try:
            yield
        finally:
            self._leave()

    @contextmanager
    def left(self) -> Iterator[None]:
        """Leaves the turn to others within the block, in which the thread waits; for threads that take turns."""
        takes = hasattr(self._mine, "turn")
        if takes:
            self._leave()
        try:
            yield
        finally:
            if takes:
                self._take()

    def _take(self) -> None:
        self._mine.turn = self._free.acquire(timeout=_PATIENCE_S)

    def _leave(self) -> None:
        if self._mine.turn:
            self._free.release()
        self._mine.turn = False
