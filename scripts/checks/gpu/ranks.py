"""Ranks that are threads on one device, forward and backward against attention written out, and where they wait.

Threads share the device's default stream, so the exchange between them needs no events, and nothing of it is timed.
"""

from __future__ import annotations

import itertools
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

from dbsp_core import SequenceGroup, SequenceLayout, Strategy
from dbsp_core.masks.steps import Progress, StepClock
from scripts.checks.gpu.results import Case, Row, Skipped
from scripts.checks.gpu.sessions import (
    PREDICTED,
    SMALL,
    TINY,
    UNEQUAL,
    Sizes,
    expected_on_one,
    inputs,
    local,
    session_of,
    whole,
)
from scripts.checks.gpu.setting import MOST_ERROR, Setting
from scripts.checks.gpu.suite import REPO
from tests.kernels.packed_inputs import relative_error
from tests.support.thread_ranks import ThreadRanks

MOST_GRADIENT_ERROR = {torch.float32: 5e-5, torch.bfloat16: 2e-2}
MASKS = {"static": UNEQUAL, "predicted": PREDICTED}
STEADY = 2  # the step that is watched
KINDS = {
    "static": (UNEQUAL, {}),
    "predicted": (PREDICTED, {}),
    "static after a dense step": (UNEQUAL, {"dense_schedule": {"first_steps": 1}}),
}
"""Masks, and other settings."""
_WATCHED = threading.local()
_PRODUCT = ("dbsp_", "kernels/")


def cases(setting: Setting) -> Iterator[Case]:
    """Yields eight ranks in bfloat16, then where they wait, then fewer ranks and float32."""
    dtypes = (torch.float32,) if setting.dry else (torch.bfloat16, torch.float32)
    worlds = (2,) if setting.simulated else (2, 4) if setting.dry else (8, 4, 2)
    kinds = ("static",) if setting.simulated else tuple(MASKS)
    exact = [
        Case(f"{strategy}, {kind}, {str(dtype)[6:]}", partial(one_strategy, setting, strategy, MASKS[kind], dtype))
        for dtype, world in itertools.product(dtypes, worlds)
        for strategy, kind in itertools.product(strategies_of(world), kinds)
    ]
    first = len(exact) if setting.dry else len(strategies_of(8)) * len(kinds)
    yield from exact[:first]
    for strategy in ("U2R1",) if setting.dry else ("U1R1", "U8R1", "U2R4", "U1R8"):
        for kind in ("predicted",) if setting.simulated else KINDS:
            yield Case(f"waits, {strategy}, {kind}", partial(waiting, setting, strategy, kind))
    yield from exact[first:]


def one_strategy(setting: Setting, strategy: str, mask: dict[str, Any], dtype: torch.dtype) -> Iterator[Row]:
    """Compares one attention and its backward."""
    sizes = TINY if setting.dry else SMALL
    *qkv, dout = inputs(setting.device, sizes, dtype)
    expected = expected_on_one(sizes, mask, qkv, dout)
    with launches_one_after_another():
        results = ThreadRanks(Strategy.parse(strategy).world).run(on_rank, setting, sizes, strategy, mask, qkv, dout)
    layout, by_rank = results[0][0], [parts for _, parts in results]
    for (name, limit), right, *shards in zip(limits_of(dtype).items(), expected, *by_rank, strict=True):
        yield Row(f"error of {name}", relative_error(whole(shards, layout), right), "‖·‖", limit)


def waiting(setting: Setting, strategy: str, kind: str) -> Iterator[Row]:
    """Counts waits of one layer's call in a steady step, all ranks together."""
    if setting.device == "cpu":
        raise Skipped("nothing to wait for on a CPU")
    with recorded(setting), launches_one_after_another():
        world = Strategy.parse(strategy).world
        seen = sum(ThreadRanks(world).run(waits_on_rank, setting, strategy, kind), Counter[str]())
    yield Row("waits", float(sum(seen.values())), "", 0.0)
    for where, times in seen.most_common():
        yield Row(f"waits at {where}", float(times))


def limits_of(dtype: torch.dtype) -> dict[str, float]:
    """Returns the largest error of the output and of each gradient."""
    return {"output": MOST_ERROR[dtype]} | dict.fromkeys(("dq", "dk", "dv"), MOST_GRADIENT_ERROR[dtype])


def strategies_of(world: int) -> list[str]:
    return [f"U{world // ring}R{ring}" for ring in (1, 2, 4, 8) if world % ring == 0]


@contextmanager
def launches_one_after_another() -> Iterator[None]:
    """Lets one thread at a time launch a kernel, because a first launch compiles it."""
    from triton.runtime.jit import JITFunction

    lock, run = threading.RLock(), JITFunction.run

    def locked(self: Any, *args: Any, **options: Any) -> Any:
        with lock:
            return run(self, *args, **options)

    with mock.patch.object(JITFunction, "run", locked):
        yield


def on_rank(
    rank: int,
    world: int,
    setting: Setting,
    sizes: Sizes,
    strategy: str,
    mask: dict[str, Any],
    qkv: list[torch.Tensor],
    dout: torch.Tensor,
) -> tuple[SequenceLayout, list[torch.Tensor]]:
    """Returns the layout, and this rank's output and gradients."""
    session = session_of(sizes, SequenceGroup.from_group(), strategy, mask)
    layout = session.begin(sizes.video, timestep=900.0, device=setting.device)
    mine = [local(one, layout, rank).requires_grad_(True) for one in qkv]
    out = session.attend(0, *mine)
    # The engine has one thread per GPU, in which a rank's exchange would wait for ranks that need the same thread.
    with torch.autograd.set_multithreading_enabled(False):
        out.backward(local(dout, layout, rank))
    session.end()
    session.flush()
    return layout, [out.detach(), *(one.grad for one in mine)]


def recorded(setting: Setting) -> AbstractContextManager[Any]:
    """Notes waits of threads that are `watched`."""
    return recorded_by_simulation() if setting.dry else recorded_by_cuda()


def waits_on_rank(rank: int, world: int, setting: Setting, strategy: str, kind: str) -> Counter[str]:
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
