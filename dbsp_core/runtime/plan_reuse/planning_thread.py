"""One thread that does jobs in the order in which they come."""

from __future__ import annotations

import atexit
import queue
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from dbsp_core.comm.groups import CommunicationError

__all__ = ["PlanningThread"]

LAST_JOBS_S = 3.0
"""Seconds that the end of the program waits for jobs under way. A thread that the interpreter stops within a tensor
operation aborts the process."""

_Jobs = queue.SimpleQueue["tuple[Future[Any], Callable[[], Any]] | None"]


class PlanningThread:
    """Runs jobs one after the other in a thread, which ends with this object or with the program.

    The order matters: jobs may hold collectives, which every rank must enter in the same order. Once communication
    has broken off in one, later ones are not begun, and raise the same: each would wait for the others' timeout again.
    """

    def __init__(self) -> None:
        self._jobs: _Jobs = queue.SimpleQueue()
        self._started = False

    def submit(self, job: Callable[[], Any]) -> Future[Any]:
        """Queues a job. returns: what it returns or raises, once it has"""
        if not self._started:
            self._start()
        future: Future[Any] = Future()
        self._jobs.put((future, job))
        return future

    def _start(self) -> None:
        # A daemon, so that a job that hangs does not keep the program from ending.
        thread = threading.Thread(target=_work, args=(self._jobs,), name="dbsp-planning", daemon=True)
        thread.start()
        _RUNNING[thread] = self._jobs
        weakref.finalize(self, self._jobs.put, None).atexit = False
        self._started = True


_RUNNING: weakref.WeakKeyDictionary[threading.Thread, _Jobs] = weakref.WeakKeyDictionary()


def _work(jobs: _Jobs) -> None:
    broken: CommunicationError | None = None
    while (job := jobs.get()) is not None:
        future, do = job
        try:
            if broken is not None:
                raise broken
            future.set_result(do())
        except CommunicationError as error:
            broken = error
            future.set_exception(error)
        except BaseException as error:  # to be raised where the result is asked for
            future.set_exception(error)
        del job, future, do  # or the last job's tensors would be held until the next one comes


@atexit.register
def _end() -> None:
    running = list(_RUNNING.items())
    for _, jobs in running:
        jobs.put(None)
    for thread, _ in running:
        thread.join(LAST_JOBS_S)
    if running:
        time.sleep(0.02)  # gloo's threads need the interpreter to release the last collective's tensors
