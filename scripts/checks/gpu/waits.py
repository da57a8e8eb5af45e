"""Step 3: where a steady call makes the host wait for the device, by file and line."""

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

from dbsp_core import SequenceGroup, Strategy
from dbsp_core.masks.steps import Progress, StepClock
from scripts.checks.gpu.journal import REPO, Case, Row, Skipped
from scripts.checks.gpu.ranks import MASKS, inputs, launches_one_after_another
from scripts.checks.gpu.sessions import SMALL, TINY, local, session_of
from scripts.checks.gpu.setting import Setting
from tests.support.thread_ranks import ThreadRanks

STEADY = 2
"""The step that is watched."""
KINDS = {
    "static": (MASKS["static"], {}),
    "predicted": (MASKS["predicted"], {}),
    "static after a dense step": (MASKS["static"], {"dense_schedule": {"first_steps": 1}}),
}
"""Masks, and other settings."""
_WATCHED = threading.local()
_PRODUCT = ("dbsp_", "kernels/")


def cases(setting: Setting) -> Iterator[Case]:
    for strategy in ("U2R1",) if setting.dry else ("U1R1", "U8R1", "U2R4", "U1R8"):
        for kind in KINDS:
            yield Case(f"{strategy}, {kind}", partial(waits, setting, strategy, kind))


def waits(setting: Setting, strategy: str, kind: str) -> Iterator[Row]:
    """Waits of one layer's call in a steady step, all ranks together."""
    if setting.device == "cpu":
        raise Skipped("nothing to wait for on a CPU")
    with recorded_by_simulation() if setting.dry else recorded_by_cuda(), launches_one_after_another():
        by_rank = ThreadRanks(Strategy.parse(strategy).world).run(on_rank, setting, strategy, kind)
    seen: Counter[str] = sum(by_rank, Counter())
    yield Row("waits", float(sum(seen.values())), "", 0.0)
    for where, times in seen.most_common():
        yield Row(f"waits at {where}", float(times))


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
            full = inputs(setting, sizes, dtype, step)[:3]
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
