"""A step in the middle of a denoising on workers, watched for collectives and for db-SP's own code."""

from __future__ import annotations

import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from types import FrameType
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import dbsp_core.runtime.chunk_attention
import dbsp_kernels
from dbsp_core import SequenceGroup
from dbsp_core.comm import groups
from dbsp_core.config import DbspConfig
from dbsp_core.layout.strategy import Strategy
from dbsp_core.masks.grid import Video
from dbsp_core.reports.observer import observed_session

ROOTS = tuple(os.path.dirname(package.__file__ or "") for package in (dbsp_core, dbsp_kernels))


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


@contextmanager
def _calls_noted(note: Callable[[FrameType], object]) -> Iterator[None]:
    """Passes the frame of each call within the block to a function."""
    sys.setprofile(lambda frame, event, _: event == "call" and note(frame))
    yield
    sys.setprofile(None)


def _attend_in_third_step(settings: dict[str, Any], strategy: str, watch: AbstractContextManager[Any]) -> Any:
    """Attends in three steps of one layer, in the third within `watch`, whose value it returns."""
    config = DbspConfig.load(settings)
    session = observed_session(config, SequenceGroup.from_group(), Strategy.parse(strategy), heads=4, layers=1)
    for step in range(3):
        layout = session.begin(Video((4, 8, 8)), timestep=900.0 - step)
        q, k, v = torch.randn(3, 1, 4, layout.shard, 16, generator=torch.Generator().manual_seed(step))
        with watch if step == 2 else nullcontext() as seen:
            session.attend(0, q, k, v)
    return seen


def files_of_a_steady_step(rank: int, world: int, settings: dict[str, Any], strategy: str) -> list[str]:
    """Returns db-SP's files whose functions run in the third step of one layer, over a group as on GPUs."""
    paths: set[str] = set()
    with torch.no_grad():
        _attend_in_third_step(settings, strategy, _calls_noted(lambda frame: paths.add(frame.f_code.co_filename)))
    return sorted(path for path in paths if path.startswith(ROOTS))


def collectives_of_a_steady_step(rank: int, world: int, settings: dict[str, Any], strategy: str) -> dict[str, int]:
    """Returns what the third step of one layer sends and receives, by name."""
    return dict(_attend_in_third_step(settings, strategy, collectives()))
