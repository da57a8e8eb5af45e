"""One thread that does jobs in the order in which they come."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

__all__ = ["Background"]


class Background:
    """Runs jobs one after the other in a thread that does not keep the program from ending.

    The order matters: jobs may hold collectives, which every rank must enter in the same order.
    """

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, job: Callable[[], Any]) -> Future[Any]:
        """Queues a job. returns: what it returns or raises, once it has"""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="dbsp-planning", daemon=True)
            self._thread.start()
        future: Future[Any] = Future()
        self._jobs.put((future, job))
        return future

    def _work(self) -> None:
        while True:
            future, job = self._jobs.get()
            try:
                future.set_result(job())
            except BaseException as error:  # to be raised where the result is asked for
                future.set_exception(error)
            del future, job  # or the last job's tensors would be held until the next one comes
