"""The process that programs are forked from: `python -m tests.support.programs.server LISTENER LIFE`.

It imports what is large and not db-SP's: that is imported anew in each program.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import pickle
import select
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
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


def _preload() -> None:
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"  # each program does it
    for name in PRELOADED:
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(name)
    del os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"]


class Server:
    """Forks a program for each request, and reports its exit status to the process that asked.

    Args:
        life: A file that ends with the process whose server this is.
    """

    def __init__(self, listener: socket.socket, life: int) -> None:
        self._listener, self._life = listener, life
        self._client = Client(listener.getsockname(), read_at_import(os.environ))
        self._started: dict[int, tuple[int, int]] = {}  # by process, where its status is written, and who asked for it
        self._woken, wake = os.pipe()
        os.set_blocking(wake, False)
        self._before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGCHLD)}
        self._files = set(open_files()) - {listener.fileno(), life, self._woken, wake}
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)

    def run(self) -> None:
        """Runs until the life ends; nothing that was started outlives it."""
        gc.collect()
        gc.freeze()
        while True:
            ready, _, _ = select.select([self._listener, self._life, self._woken], [], [])
            if self._life in ready:
                break
            if self._woken in ready:
                os.read(self._woken, 1 << 12)
                self._report()
            if self._listener in ready:
                self._answer()
        for process in self._started:
            end_with_descendants(process)

    def _answer(self) -> None:
        connection, _ = self._listener.accept()
        with connection:
            credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
            request, files, _, _ = socket.recv_fds(connection, MOST_BYTES, 4)
            if files:
                process = self._start(pickle.loads(request), files[:3])
                self._started[process] = files[3], struct.unpack("3i", credentials)[0]
                connection.send(process.to_bytes(4, "little"))
        for number in files[:3]:
            os.close(number)

    def _start(self, request: dict[str, Any], streams: list[int]) -> int:
        process = os.fork()
        if process == 0:
            run_to_its_end(lambda: self._become(request, streams), FOLDER)
        return process

    def _become(self, request: dict[str, Any], streams: list[int]) -> None:
        signal.set_wakeup_fd(-1)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        take_streams(streams, self._files)
        os.chdir(request["folder"])
        if request["new_session"]:
            os.setsid()
        program.client = self._client
        subprocess.Popen = program.Program  # type: ignore[misc]
        run_program(Command(*request["command"]), request["environment"])

    def _report(self) -> None:
        """Reports the end of processes, and ends what they had started: it has no other parent."""
        while self._started:
            process, status = os.waitpid(-1, os.WNOHANG)
            if process == 0:
                return
            where, _ = self._started.pop(process)
            with contextlib.suppress(BrokenPipeError):
                os.write(where, status.to_bytes(4, "little"))
            os.close(where)
            for child in [child for child, (_, parent) in self._started.items() if parent == process]:
                os.kill(child, signal.SIGKILL)


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
    from tests.support.programs import program
    from tests.support.programs.command import Command, read_at_import
    from tests.support.programs.ending import run_to_its_end
    from tests.support.programs.fresh import FOLDER, open_files, run_program, take_streams
    from tests.support.programs.program import MOST_BYTES, Client, end_with_descendants

    listener, life = map(int, sys.argv[1:])
    run_to_its_end(Server(socket.socket(fileno=listener), life).run)
