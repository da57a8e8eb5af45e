"""Ranks that are processes, each with a simulated device of its own, for what needs torch.distributed itself.

They are forked from one process that has devices and has imported what takes long.
"""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from tests.gpu_node.node import NodeError, start_devices
from tests.support.ports import free_port

_SAFETY_NET_S = 300


class GpuProcesses:
    """`world` processes as torchrun would start them, in which no process group is made yet."""

    def __init__(self, world: int) -> None:
        context = multiprocessing.get_context("spawn")  # torch must not be there yet
        launcher = {"MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
        pipes = [context.Pipe() for _ in range(world)]
        self._pipes: list[Connection] = [ours for ours, _ in pipes]
        self._parent = context.Process(target=_fork_ranks, args=([theirs for _, theirs in pipes], launcher))
        self._parent.start()
        for _, theirs in pipes:
            theirs.close()

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Calls function(rank, world, *args) on every rank. Returns its results by rank.

        Raises NodeError if a rank raises, ends, or does not answer.
        """
        port = str(free_port())  # each run's own: a rank could meet the store of the run before
        for pipe in self._pipes:
            pipe.send((port, function, args))
        answers = [self._answer(pipe) for pipe in self._pipes]
        for fine, answer in answers:
            if not fine:
                raise NodeError(*answer)
        return [answer for _, answer in answers]

    def _answer(self, pipe: Connection) -> tuple[bool, Any]:
        if not pipe.poll(_SAFETY_NET_S):
            self.close()
            return False, ("Hang", f"no answer within {_SAFETY_NET_S} s", "")
        try:
            answer: tuple[bool, Any] = pipe.recv()
        except EOFError:
            return False, ("End", "the rank's process has ended", "")
        return answer

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._parent.pid or 0, signal.SIGKILL)  # it leads the group of all ranks
        self._parent.join()


def _fork_ranks(pipes: list[Connection], launcher: dict[str, str]) -> None:
    os.setsid()
    start_devices()
    from tests.gpu_node.process_groups import carry_nccl_over_gloo

    carry_nccl_over_gloo()
    importlib.import_module("tests.simulated.test_programs")
    ranks = []
    for rank, pipe in enumerate(pipes):
        if (process := os.fork()) == 0:
            for other in pipes[:rank] + pipes[rank + 1 :]:
                other.close()
            os.environ.update(launcher | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
            _run_calls(pipe, rank, len(pipes))
            os._exit(0)
        ranks.append(process)
    for pipe in pipes:
        pipe.close()
    for process in ranks:
        os.waitpid(process, 0)


def _run_calls(pipe: Connection, rank: int, world: int) -> None:
    from tests.gpu_node import streams
    from tests.gpu_node.faults import recorded

    streams.own(rank)
    while True:
        try:
            os.environ["MASTER_PORT"], function, args = pipe.recv()
        except EOFError:
            return
        recorded.clear()
        try:
            pipe.send((True, function(rank, world, *args)))
        except BaseException as error:
            pipe.send((False, (type(error).__name__, f"rank {rank}: {error}", traceback.format_exc())))
