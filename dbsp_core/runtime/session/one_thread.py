"""One thread at a time on the same ranks: two would answer each other's collectives."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from dbsp_core.comm.groups import SequenceGroup
from dbsp_core.utils.errors import UserError

__all__ = ["OneThread"]

TWO_THREADS = (
    "two threads use db-SP on the same ranks at once, which would answer each other's calls; let one run at a time, "
    "or give each a process group of its own"
)
_LOCKS: weakref.WeakKeyDictionary[dist.ProcessGroup, threading.Lock] = weakref.WeakKeyDictionary()


class OneThread:
    """Keeps a second thread out while one is within a call on a group's ranks, whichever sessions they use."""

    def __init__(self, group: SequenceGroup) -> None:
        process_group, lock = group.group, threading.Lock()
        self._lock = lock if process_group is None else _LOCKS.setdefault(process_group, lock)

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Context of one call. Raises UserError where another thread is within one."""
        if not self._lock.acquire(blocking=False):
            raise UserError(TWO_THREADS)
        try:
            yield
        finally:
            self._lock.release()
