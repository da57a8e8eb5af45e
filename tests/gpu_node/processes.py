"""Ranks that are processes, each with a simulated device of its own, for what needs torch.distributed itself."""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from tests.gpu_node.node import NodeError
from tests.support.ports import free_port

_SAFETY_NET_S = 300


class GpuProcesses:
    """`world` processes as torchrun would start them, in which no process group is made yet."""

    def __init__(self, world: int) -> None:
        context = multiprocessing.get_context("spawn")  # torch must not be there yet
        launcher = {"MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(world):
            ours, theirs = context.Pipe()
            environment = launcher | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            process = context.Process(target=_run_calls, args=(theirs, environment), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

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
        for process in self._processes:
            process.kill()
            process.join()


def _run_calls(pipe: Connection, environment: dict[str, str]) -> None:
    os.environ.update(environment)
    from tests.gpu_node.program import become_rank

    become_rank()
    from tests.gpu_node.faults import recorded

    rank, world = int(environment["RANK"]), int(environment["WORLD_SIZE"])
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
