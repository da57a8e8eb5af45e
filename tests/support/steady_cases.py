"""Counts of what a process sends and receives."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch.distributed as dist

from dbsp_core.comm import groups

COLLECTIVES = (
    *("all_to_all_single", "all_gather", "batch_isend_irecv", "barrier", "monitored_barrier", "broadcast"),
    "all_reduce",
)


@contextmanager
def collectives() -> Iterator[Counter[str]]:
    """Counts what this thread starts to send and receive within the block, by torch.distributed's name of it."""
    seen: Counter[str] = Counter()

    def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **options: Any) -> Any:
            if threading.current_thread() is threading.main_thread():
                seen[name] += 1
            return function(*args, **options)

        return run

    with ExitStack() as patches:
        for owner, name in [*((dist, name) for name in COLLECTIVES), (groups, "_all_gather_single")]:
            patches.enter_context(mock.patch.object(owner, name, counted(name, getattr(owner, name))))
        yield seen
