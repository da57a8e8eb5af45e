"""Worker processes on gloo, started once per world size and sent many cases: importing diffusers costs seconds."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import pytest

SAFETY_NET_S = 300  # ends a hang; no test is timed by it
PRELOADED = (
    "tests.support.interpreter",  # before anything else imports triton
    "tests.support.attention_cases",
    "torch._dynamo",
    "diffusers.pipelines.wan.pipeline_wan_i2v",
    "diffusers.pipelines.cogvideo.pipeline_cogvideox",
)
"""What every worker has from its birth; one that is not installed is left out."""
MOST_THREADS = 100
"""Of a worker. Every gloo group brings threads that poll for as long as the process lives, destroyed or not."""


class WorkerError(AssertionError):
    """A worker raised; `errors` holds (rank, exception type name, message)."""

    def __init__(self, errors: list[tuple[int, str, str]], trace: str) -> None:
        super().__init__(f"{errors}\n{trace}")
        self.errors = errors


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
            process = context.Process(target=_serve, args=(rank, world, store, theirs), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Calls function(rank, world, *args) on every rank. Returns its results by rank. Raises WorkerError."""
        for pipe in self._pipes:
            pipe.send((function, args))
        answers = []
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(self._patience_s):
                self.close()
                raise WorkerError([(rank, "Hang", f"no answer from rank {rank}")], "")
            answers.append(pipe.recv())
        errors = [(rank, kind, text) for rank, (ok, kind, text, _) in enumerate(answers) if not ok]
        if errors:
            raise WorkerError(errors, next(trace for ok, _, _, trace in answers if not ok))
        return [value for _, _, _, value in answers]

    @property
    def crowded(self) -> bool:
        """Whether groups have piled up in the workers, so that their threads slow everything down."""
        folders = [f"/proc/{process.pid}/task" for process in self._processes]
        return any(os.path.isdir(folder) and len(os.listdir(folder)) > MOST_THREADS for folder in folders)

    def close(self) -> None:
        for process in self._processes:
            process.kill()
        self._folder.cleanup()


def _serve(rank: int, world: int, store: str, pipe: Connection) -> None:
    import torch
    import torch.distributed as dist

    from tests.support import interpreter  # noqa: F401  before anything else imports triton

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    while True:
        function, args = pipe.recv()
        try:
            pipe.send((True, "", "", function(rank, world, *args)))
        except Exception as error:
            pipe.send((False, type(error).__name__, str(error), traceback.format_exc()))


def assert_all_raise(
    pool: Callable[[int], WorkerPool], world: int, message: str, function: Callable[..., Any], *args: Any
) -> None:
    """All ranks raise a UserError with this message."""
    with pytest.raises(WorkerError) as caught:
        pool(world).run(function, *args)
    assert [rank for rank, *_ in caught.value.errors] == list(range(world))
    for _, kind, text in caught.value.errors:
        assert (kind, message in text) == ("UserError", True), text
