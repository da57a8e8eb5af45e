"""Run by the workers: a step in the middle of a denoising, watched for waits of the host for a device."""

from __future__ import annotations

import os
import pkgutil
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from types import FrameType
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import dbsp_core.runtime.chunk_attention
import dbsp_kernels
from dbsp_core import SequenceGroup
from dbsp_core.comm import groups
from dbsp_core.config import DbspConfig
from dbsp_core.layout.strategy import Strategy
from dbsp_core.masks.grid import Video
from dbsp_core.reports.observer import observed_session

ROOTS = tuple(os.path.dirname(package.__file__ or "") for package in (dbsp_core, dbsp_kernels))
_SCALARS = ("item", "tolist", "__bool__", "__int__", "__float__", "__index__", "equal", "allclose")
_SIZES = ("nonzero", "masked_select", "unique")
WAITS = frozenset(("cpu", "numpy", *_SCALARS, *_SIZES))
"""Functions whose values the host needs, or whose result's size: on a GPU each waits for all that is queued."""


class Watch(TorchFunctionMode):
    """Counts calls of WAITS in this thread."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name in WAITS:
            self.seen[name] += 1
        return func(*args, **(kwargs or {}))


VIEWS = {
    *("alias", "as_strided", "detach", "empty", "empty_like", "empty_strided", "expand", "is_pinned", "lift_fresh"),
    *("new_empty", "permute", "promote_types", "select", "slice", "split", "split_with_sizes", "squeeze", "t"),
    *("transpose", "unbind", "unsqueeze", "view", "_reshape_alias", "_unsafe_view"),
}
"""Operators that compute nothing, or only make room."""
FUSED = (
    *("dbsp_core.comm.exchange.copy_segments", "dbsp_core.runtime.tables.expand_rows"),
    *("dbsp_core.runtime.tables.pack_rows", "dbsp_core.comm.block_pooling.sum_tokens"),
    *("dbsp_core.comm.block_pooling.pool_rows", "dbsp_core.sources.sparge.pooled_scores"),
    "dbsp_core.sources.sparge.select_blocks",
    *("dbsp_core.planning.comm_dtype.copy_segments", "dbsp_core.planning.comm_dtype.quantise_segments"),
    *("dbsp_core.planning.comm_dtype.restore_rows", "dbsp_core.comm.exchange.sum_tokens"),
)
"""What on a GPU is one kernel each, for any CPU takes: ours."""


class Launches(TorchDispatchMode):
    """Counts operators of this thread by name; FUSED functions as one each."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()
        self.fused = False
        self._patches = ExitStack()

    def __enter__(self) -> Launches:
        for name in FUSED:
            owner, _, attribute = name.rpartition(".")
            function = pkgutil.resolve_name(name)
            self._patches.enter_context(mock.patch(f"{owner}.{attribute}", self._as_one(attribute, function)))
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._patches.close()

    def _as_one(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **options: Any) -> Any:
            self.seen[name] += 1
            self.fused = True
            try:
                return function(*args, **options)
            finally:
                self.fused = False

        return run

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.split("::")[1]
        if not self.fused and name not in VIEWS:
            self.seen[name] += 1
        return func(*args, **(kwargs or {}))


class Collectives:
    """Counts what this thread starts to send and receive, by torch.distributed's name of it."""

    NAMES = ("all_to_all_single", "all_gather", "batch_isend_irecv", "barrier", "broadcast", "all_reduce")

    def __init__(self) -> None:
        self.seen: Counter[str] = Counter()
        self._patches = ExitStack()

    def __enter__(self) -> Collectives:
        for owner, name in [*((dist, name) for name in self.NAMES), (groups, "_all_gather_single")]:
            self._patches.enter_context(mock.patch.object(owner, name, self._counted(name, getattr(owner, name))))
        return self

    def __exit__(self, *error: Any) -> None:
        self._patches.close()

    def _counted(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **options: Any) -> Any:
            if threading.current_thread() is threading.main_thread():
                self.seen[name] += 1
            return function(*args, **options)

        return run


def collectives_of_a_steady_step(rank: int, world: int, settings: dict[str, Any], strategy: str) -> dict[str, int]:
    """The third step of one layer, by name."""
    return _in_a_steady_step(settings, strategy, 4, Collectives())


def launches_of_a_steady_step(
    rank: int, world: int, settings: dict[str, Any], strategy: str, heads: int, thw: tuple[int, int, int]
) -> dict[str, int]:
    """Operators of the third step of one layer on this rank, outside the attention kernel, by name."""
    return _in_a_steady_step(settings, strategy, heads, Launches(), thw)


def waits_of_a_steady_step(rank: int, world: int, settings: dict[str, Any], strategy: str) -> dict[str, int]:
    """The third step of one layer."""
    return _in_a_steady_step(settings, strategy, 4, Watch())


def frames_of_a_steady_step(rank: int, world: int, settings: dict[str, Any], strategy: str) -> int:
    """Returns the most Python frames within the third step of one layer, those of torch and of the kernel included."""
    deepest = 0

    def called(frame: FrameType, event: str, _: Any) -> None:
        nonlocal deepest
        if event == "call":
            deepest = max(deepest, sum(1 for _ in traceback.walk_stack(frame)))

    around = _profiled_steady_step(settings, strategy, called)
    return deepest - around


def files_of_a_steady_step(rank: int, world: int, settings: dict[str, Any], strategy: str) -> list[str]:
    """Returns db-SP's files whose functions run in the third step of one layer, over a group as on GPUs."""
    seen = set()

    def called(frame: FrameType, event: str, _: Any) -> None:
        path = frame.f_code.co_filename
        if event == "call" and path.startswith(ROOTS):
            seen.add(path)

    with torch.no_grad():
        _profiled_steady_step(settings, strategy, called)
    return sorted(seen)


def _profiled_steady_step(
    settings: dict[str, Any], strategy: str, called: Callable[[FrameType, str, Any], None]
) -> int:
    """Calls a profiler in the third step of one layer, and returns how many frames there are around that step."""
    config = DbspConfig.load(settings)
    session = observed_session(config, SequenceGroup.from_group(), Strategy.parse(strategy), heads=4, layers=1)
    for step in range(3):
        layout = session.begin(Video((4, 8, 8)), timestep=900.0 - step)
        q, k, v = torch.randn(3, 1, 4, layout.shard, 16)
        sys.setprofile(called if step == 2 else None)
        session.attend(0, q, k, v)
        sys.setprofile(None)
    return sum(1 for _ in traceback.walk_stack(sys._getframe()))


def _no_kernel(q: torch.Tensor, *_: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(q), torch.empty(q.shape[:2])


def _in_a_steady_step(
    settings: dict[str, Any],
    strategy: str,
    heads: int,
    watch: Watch | Launches | Collectives,
    thw: tuple[int, int, int] = (4, 8, 8),
) -> dict[str, int]:
    """What is seen of it. The kernel is left out: the CPU's own reads its tables, a GPU's does not."""
    config = DbspConfig.load(settings)
    session = observed_session(config, SequenceGroup.from_group(), Strategy.parse(strategy), heads=heads, layers=1)

    with mock.patch.object(dbsp_core.runtime.chunk_attention, "block_attention", _no_kernel):
        for step in range(3):
            layout = session.begin(Video(thw), timestep=900.0 - step)
            q, k, v = torch.randn(3, 1, heads, layout.shard, 16, generator=torch.Generator().manual_seed(step))
            if step < 2:
                session.attend(0, q, k, v)
        with watch:
            session.attend(0, q, k, v)
    session.reuse  # noqa: B018  waits for what is being planned
    return dict(watch.seen)
