"""The process with simulated devices, to which tests send functions."""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from tests.gpu_node import runtime

DEVICES = 8
_SAFETY_NET_S = 300
_BEFORE_CUDA = (
    "diffusers.pipelines.wan.pipeline_wan",
    "diffusers.models.transformers.transformer_wan",
)
"""Imported before torch.cuda is replaced: their annotations name its classes."""


class NodeError(AssertionError):
    """A function failed; `kind` is the exception's name."""

    def __init__(self, kind: str, text: str, trace: str) -> None:
        super().__init__(f"{kind}: {text}\n{trace}")
        self.kind, self.text = kind, text


class GpuNode:
    """A process with `DEVICES` simulated devices of one architecture a call."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")  # torch must not be there yet
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_run_calls, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()

    def run(self, world: int, function: Callable[..., Any], *args: Any, arch: int = 90) -> list[Any]:
        """Calls function(rank, world, *args) on `world` ranks, each on its own device. Returns its results by rank.

        Raises NodeError if a rank raises.
        """
        self._pipe.send((world, arch, function, args))
        if not self._pipe.poll(_SAFETY_NET_S):
            self.close()
            raise NodeError("Hang", f"no answer within {_SAFETY_NET_S} s", "")
        fine, answer = self._pipe.recv()
        if not fine:
            raise NodeError(*answer)
        results: list[Any] = answer
        return results

    def close(self) -> None:
        self._process.kill()
        self._process.join()


def start_devices() -> None:
    """Gives this process `DEVICES` simulated devices, for good. torch must not be imported yet."""
    library = runtime.load(DEVICES)
    import importlib.util

    import torch

    torch.set_num_threads(1)
    from tests.support import interpreter  # before anything else imports triton

    with interpreter.interpreted():
        importlib.import_module("triton.experimental.gluon")  # which Triton imports at its first launch
    if importlib.util.find_spec("diffusers") is not None:
        for name in _BEFORE_CUDA:
            importlib.import_module(name)
    from tests.gpu_node import cuda_api

    cuda_api.activate(library, DEVICES)


def _run_calls(pipe: Connection) -> None:
    start_devices()
    from tests.gpu_node import cuda_api
    from tests.gpu_node.faults import recorded
    from tests.gpu_node.ranks import DeviceRanks

    while True:
        try:
            world, arch, function, args = pipe.recv()
        except EOFError:
            return
        cuda_api.architecture(arch)
        recorded.clear()
        try:
            pipe.send((True, DeviceRanks(world).run(function, *args)))
        except BaseException as error:
            pipe.send((False, (type(error).__name__, str(error), traceback.format_exc())))
