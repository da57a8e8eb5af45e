"""Counts waits of a steady call's host for the device, by file and line."""

from __future__ import annotations

import threading
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from dbsp_core import SequenceGroup
from dbsp_core.masks.steps import Progress, StepClock
from scripts.checks.gpu.sessions import PREDICTED, SMALL, TINY, UNEQUAL, inputs, local, session_of
from scripts.checks.gpu.setting import Setting
from scripts.checks.gpu.suite import REPO

STEADY = 2
"""The step that is watched."""
KINDS = {
    "static": (UNEQUAL, {}),
    "predicted": (PREDICTED, {}),
    "static after a dense step": (UNEQUAL, {"dense_schedule": {"first_steps": 1}}),
}
"""Masks, and other settings."""
_WATCHED = threading.local()
_PRODUCT = ("dbsp_", "kernels/")


def recorded(setting: Setting) -> AbstractContextManager[Any]:
    """Notes waits of threads that are `watched`."""
    return recorded_by_simulation() if setting.dry else recorded_by_cuda()


def on_rank(rank: int, world: int, setting: Setting, strategy: str, kind: str) -> Counter[str]:
    """Counts the lines where this rank waits in its steady step."""
    sizes, (mask, settings) = TINY if setting.dry else SMALL, KINDS[kind]
    dtype = torch.float32 if setting.dry else torch.bfloat16
    seen: Counter[str] = Counter()
    step = 0
    clock = StepClock(lambda: Progress("a video", step))  # pipelines say the step, too
    session = session_of(sizes, SequenceGroup.from_group(), strategy, mask, clock, **settings)
    with torch.no_grad():
        for step in range(STEADY + 1):
            timestep = torch.tensor(900.0 - step, device=setting.device)
            full = inputs(setting.device, sizes, dtype, step)[:3]
            begin = partial(session.begin, sizes.video, timestep=timestep, device=setting.device)
            layout = begin() if step == 0 else session.layout
            q, k, v = (local(one, layout, rank) for one in full)
            if setting.dry:
                begin_simulated_step(session.group)
            with watched(seen) if step == STEADY else nullcontext():
                if step:
                    begin()
                session.attend(0, q, k, v)
            session.end()
    session.flush()
    return seen


@contextmanager
def watched(seen: Counter[str]) -> Iterator[None]:
    """Counts this thread's waits by line."""
    _WATCHED.seen = seen
    try:
        yield
    finally:
        del _WATCHED.seen


def note(*_: Any, **__: Any) -> None:
    """Counts a wait of the calling thread."""
    seen, where = getattr(_WATCHED, "seen", None), line_of_product()
    if seen is not None and where:
        seen[where] += 1


@contextmanager
def recorded_by_cuda() -> Iterator[None]:
    """Notes what CUDA warns of."""

    def show(message: Warning | str, *_: Any, **__: Any) -> None:
        if "called a synchronizing" in str(message):
            note()

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = show
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")


def recorded_by_simulation() -> AbstractContextManager[Any]:
    """Notes what the simulated GPU node counts."""
    from tests.gpu_node.faults import recorded

    def show(what: str, *, past: bool = False) -> None:
        if not past:  # a device that keeps up has done the work of the step before, as CUDA's has
            note()

    return mock.patch.object(recorded, "host_wait", show)


def begin_simulated_step(group: SequenceGroup) -> None:
    """Lets the simulated GPU node know that what was launched so far is the step before's. Collective."""
    from tests.gpu_node.faults import recorded

    group.control().barrier()
    recorded.begin_step()
    group.control().barrier()


def line_of_product() -> str:
    """Returns the innermost lines of the product that run, callers last, or "" if the group of threads waits."""
    lines: list[str] = []
    for frame in traceback.extract_stack():
        path = Path(frame.filename)
        relative = path.relative_to(REPO).as_posix() if path.is_relative_to(REPO) else ""
        if relative.startswith("tests/support/thread_group.py"):
            return ""
        line = f"{relative}:{frame.lineno}"
        if relative.startswith(_PRODUCT) and lines[-1:] != [line]:
            lines.append(line)
    return " < ".join(lines[:-7:-1])
