"""The process that programs are forked from: `python -m tests.support.programs.server SOCKET`.

It imports what is large and not db-SP's: that is imported anew in each program.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import select
import signal
import socket
import sys
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

PRELOADED = (
    *("torch", "torch.distributed.run", "torch.distributed.elastic.agent.server.api"),
    *("torch._dynamo", "torch.distributed.fsdp", "torch.utils.data", "torch.multiprocessing.spawn"),
    *("safetensors.torch", "yaml", "typer", "rich.progress", "rich.table", "jinja2", "matplotlib.figure"),
    *("matplotlib.backends.backend_agg", "imageio.v2", "imageio_ffmpeg", "PIL.Image", "PIL.ImageOps", "pytest"),
    "diffusers.pipelines.wan.pipeline_wan_i2v",
    "diffusers.pipelines.wan.pipeline_wan_vace",
    "diffusers.pipelines.cogvideo.pipeline_cogvideox",
    "diffusers.pipelines.auto_pipeline",
)
"""Of these, those that are installed. Not xfuser, para-attn and cache-dit: db-SP acts when they are imported."""
_OWN = ("tests", "scripts", "xfuser", "para_attn", "cache_dit")


def _preload() -> None:
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"  # each program does it
    for name in PRELOADED:
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(name)
    del os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"]


class Server:
    """Forks a program for each request, and reports its exit status to the process that asked."""

    def __init__(self, asked: socket.socket) -> None:
        from tests.support.programs.fresh import Beginning

        self._asked, self._requests = asked, Connection(os.dup(asked.fileno()))
        self._waiting: dict[int, int] = {}  # by process, where its status is written
        self._woken, wake = os.pipe()
        os.set_blocking(wake, False)
        self._before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGCHLD)}
        own = (asked.fileno(), self._requests.fileno(), self._woken, wake)
        self._beginning = Beginning.now(_OWN, own)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)

    def run(self) -> None:
        """Runs until nobody asks any more; nothing that was started outlives that."""
        gc.collect()
        gc.freeze()
        while True:
            ready, _, _ = select.select([self._asked, self._woken], [], [])
            if self._woken in ready:
                os.read(self._woken, 1 << 12)
                self._report()
            if self._asked in ready:
                try:
                    request = self._requests.recv()
                except EOFError:
                    break
                _, files, _, _ = socket.recv_fds(self._asked, 1, 4)
                self._requests.send(self._start(request, files))
        for process in [one for started in self._waiting for one in (started, *descendants(started))]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)

    def _start(self, request: dict[str, Any], files: list[int]) -> int:
        process = os.fork()
        if process == 0:
            from_here = lambda: self._become(request, files[:3])  # noqa: E731
            run_to_its_end(from_here, FOLDER)
        for number in files[:3]:
            os.close(number)
        self._waiting[process] = files[3]
        return process

    def _become(self, request: dict[str, Any], streams: list[int]) -> None:
        signal.set_wakeup_fd(-1)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        set_streams(streams)
        close_files([0, 1, 2, *self._beginning.files])
        os.chdir(request["folder"])
        if request["new_session"]:
            os.setsid()
        fork_children(self._beginning)
        run_program(self._beginning, request["command"], request["environment"])

    def _report(self) -> None:
        while self._waiting:
            process, status = os.waitpid(-1, os.WNOHANG)
            if process == 0:
                return
            where = self._waiting.pop(process)
            with contextlib.suppress(BrokenPipeError):
                os.write(where, status.to_bytes(4, "little"))
            os.close(where)


def descendants(process: int) -> list[int]:
    """Processes that a process has started, and so on."""
    found = []
    for children in Path(f"/proc/{process}/task").glob("*/children"):
        for child in map(int, children.read_text().split()):
            found += [child, *descendants(child)]
    return found


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Drops what libraries write when they are imported."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


if __name__ == "__main__":
    with _silence():
        _preload()
    # Not before: they import torch.
    from tests.support.programs.children import fork_children
    from tests.support.programs.ending import run_to_its_end
    from tests.support.programs.fresh import FOLDER, close_files, run_program, set_streams

    run_to_its_end(Server(socket.socket(fileno=int(sys.argv[1]))).run)
