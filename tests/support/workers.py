"""Worker processes on gloo, started once per world size and sent many cases: importing diffusers costs seconds."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

SAFETY_NET_S = 300  # ends a hang; no test is timed by it
PRELOADED = (
    "tests.support.interpreter",  # before anything else imports triton
    "tests.support.attention_cases",
    "torch._dynamo",
    "diffusers.pipelines.wan.pipeline_wan_i2v",
    "diffusers.pipelines.cogvideo.pipeline_cogvideox",
)
"""What every worker has from its birth; one that is not installed is left out."""
_PATIENCE_AT_THE_END_S = 2.0  # of a worker that is in a collective, and will not hear
MOST_THREADS = 100
"""Of a worker. Every gloo group brings threads that poll for as long as the process lives, destroyed or not."""


class WorkerError(AssertionError):
    """A worker raised; `errors` holds (rank, exception type name, message)."""

    def __init__(self, errors: list[tuple[int, str, str]], trace: str) -> None:
        super().__init__(f"{errors}\n{trace}")
        self.errors = errors


def values_of(answers: list[Any]) -> list[Any]:
    """Returns what ranks' functions returned. Raises WorkerError if one raised."""
    errors = [(rank, kind, text) for rank, (fine, kind, text, _) in enumerate(answers) if not fine]
    if errors:
        raise WorkerError(errors, next(trace for fine, _, _, trace in answers if not fine))
    return [value for _, _, _, value in answers]


class WorkerPool:
    """`world` processes in one gloo group.

    preloaded: modules that every worker has from its birth;  patience_s: after which no answer is a hang
    """

    def __init__(self, world: int, preloaded: tuple[str, ...] = PRELOADED, patience_s: float = SAFETY_NET_S) -> None:
        self.world = world
        self._patience_s = patience_s
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(list(preloaded))
        self._folder = tempfile.TemporaryDirectory()
        store = os.path.join(self._folder.name, "store")
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(world):
            ours, theirs = context.Pipe()
            process = context.Process(target=_run_worker, args=(rank, world, store, theirs), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Calls function(rank, world, *args) on every rank, under this process's $DBSP_DEBUG.

        Returns its results by rank. Raises WorkerError.
        """
        for pipe in self._pipes:
            pipe.send((function, args, os.environ.get("DBSP_DEBUG", "")))
        answers = []
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(self._patience_s):
                self.close()
                raise WorkerError([(rank, "Hang", f"no answer from rank {rank}")], "")
            answers.append(pipe.recv())
        return values_of(answers)

    @property
    def unfit(self) -> bool:
        """True if a worker is gone, or groups have piled up so that their threads slow everything down."""
        return any(
            not process.is_alive() or len(os.listdir(f"/proc/{process.pid}/task")) > MOST_THREADS
            for process in self._processes
        )

    def close(self) -> None:
        """Ends the workers as programs end, where the method of starting allows, so that coverage is recorded."""
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.send(None)
        end = time.monotonic() + _PATIENCE_AT_THE_END_S
        for process in self._processes:
            process.join(max(0.0, end - time.monotonic()))
            process.kill()
        self._folder.cleanup()


class WorkerPools:
    """The pools that live at a time: one for each world size, all of one folder of tests.

    What hosts patch stays in their workers, so that no other host's tests get these.
    """

    def __init__(self) -> None:
        self._folder = ""
        self._pools: dict[int, WorkerPool] = {}

    def for_folder(self, folder: str) -> Callable[[int], WorkerPool]:
        """Returns a function of the world size that gives a pool, started at first use and kept while it is fit."""
        unfit = [world for world, pool in self._pools.items() if folder != self._folder or pool.unfit]
        for world in unfit:
            self._pools.pop(world).close()
        self._folder = folder

        def get(world: int) -> WorkerPool:
            if world not in self._pools:
                self._pools[world] = WorkerPool(world)
            return self._pools[world]

        return get

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()
        self._pools.clear()


def _run_worker(rank: int, world: int, store: str, pipe: Connection) -> None:
    import torch
    import torch.distributed as dist

    from tests.support import interpreter  # noqa: F401  before anything else imports triton

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    while True:
        task = pipe.recv()
        if task is None:
            os._exit(0)  # not waiting for threads of groups
        function, args, os.environ["DBSP_DEBUG"] = task
        try:
            pipe.send((True, "", "", function(rank, world, *args)))
        except Exception as error:
            pipe.send((False, type(error).__name__, str(error), traceback.format_exc()))


def assert_all_raise(
    pool: Callable[[int], WorkerPool], world: int, message: str, function: Callable[..., Any], *args: Any
) -> None:
    """Asserts that all ranks raise a UserError with this message."""
    import pytest  # here: programs that are no tests use thread ranks

    with pytest.raises(WorkerError) as caught:
        pool(world).run(function, *args)
    assert [rank for rank, *_ in caught.value.errors] == list(range(world))
    for _, kind, text in caught.value.errors:
        assert (kind, message in text) == ("UserError", True), text
