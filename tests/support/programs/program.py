"""Replacements of `subprocess` with which tests start programs."""

from __future__ import annotations

import atexit
import contextlib
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

from tests.support.programs.command import Command, read_at_import
from tests.support.repository import ROOT, child_environment

MOST_BYTES = 1 << 20
"""Of a request, which has the environment."""


@dataclass(frozen=True)
class Client:
    """The way to the server. at_import: `read_at_import` of the server's environment"""

    address: bytes | str
    at_import: dict[str, str]

    def start(self, request: dict[str, Any], streams: Sequence[int]) -> tuple[int, int]:
        """Forks a program with these standard streams. Returns its number, and the file that its status comes from."""
        status, write = os.pipe()
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
                connection.connect(self.address)
                socket.send_fds(connection, [pickle.dumps(request)], [*streams, write])
                return int.from_bytes(connection.recv(4), "little"), status
        finally:
            os.close(write)


client: Client | None = None
"""In a program that was forked: of the server that it was forked from."""


@cache
def _new_server() -> Client:
    """Starts a server, which ends with this process."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(f"\0dbsp-programs-{os.getpid()}")
    listener.listen(64)
    life, alive = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.support.programs.server", str(listener.fileno()), str(life)],
        pass_fds=[listener.fileno(), life],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"},
    )
    address = listener.getsockname()
    listener.close()
    os.close(life)
    atexit.register(lambda: (os.close(alive), process.wait()))
    return Client(address, read_at_import(os.environ))


class Program(subprocess.Popen):
    """As `subprocess.Popen`; forked where the command and its options allow. forked: whether it was"""

    forked = False

    def _execute_child(  # type: ignore[override]
        self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *rest
    ) -> None:
        shell, (p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite) = rest[2], rest[3:9]
        gid, gids, uid, umask, new_session, *group = rest[10:]
        environment = dict(os.environ if env is None else env)
        usual = (
            not shell and preexec_fn is executable is gid is gids is uid is None and umask < 0 and group in ([], [-1])
        )
        line = [args] if isinstance(args, (str, bytes, os.PathLike)) else list(args)
        command = Command.from_line(line) if usual and not pass_fds and close_fds else None
        server = None if command is None else client or _new_server()
        if command is None or server is None or read_at_import(environment) != server.at_import:
            super()._execute_child(args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *rest)
            return
        streams = [own if given < 0 else given for own, given in enumerate((p2cread, c2pwrite, errwrite))]
        request = {
            "command": astuple(command),
            "environment": environment,
            "folder": os.path.abspath(cwd or "."),
            "new_session": new_session,
        }
        self.pid, self._status = server.start(request, streams)
        self.forked = self._child_created = True
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)

    def _internal_poll(self, _deadstate: int | None = None, *usual: Any) -> int | None:
        if not self.forked:
            return super()._internal_poll(_deadstate, *usual)
        if self.returncode is None and self._waitpid_lock.acquire(False):
            try:
                process, status = self._try_wait(os.WNOHANG)
                if process == self.pid:
                    self._handle_exitstatus(status)
            finally:
                self._waitpid_lock.release()
        return self.returncode

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        if not self.forked:
            return super()._try_wait(wait_flags)
        if self._status < 0 or (wait_flags == os.WNOHANG and not select.select([self._status], [], [], 0)[0]):
            return 0, 0
        said = os.read(self._status, 4)
        os.close(self._status)
        self._status = -1
        return self.pid, int.from_bytes(said, "little") if said else int(signal.SIGKILL)


def run(arguments: Sequence[object], timeout: float = 300, **options: Any) -> subprocess.CompletedProcess[str]:
    """Runs a program as `subprocess.run` does, output as text. After `timeout` seconds it and all it started end."""
    given = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **options}
    words = [os.fspath(word) if isinstance(word, os.PathLike) else str(word) for word in arguments]
    with Program(words, **given) as program:
        try:
            out, err = program.communicate(timeout=timeout)
        except BaseException:
            end_with_descendants(program.pid)
            raise
    return subprocess.CompletedProcess(words, program.returncode, out, err)


def run_module(module: str, *arguments: object, timeout: float = 300) -> subprocess.CompletedProcess[str]:
    """Runs `python -m module arguments` on one thread, and returns what it wrote."""
    environment = child_environment() | {"OMP_NUM_THREADS": "1"}
    return run([sys.executable, "-m", module, *arguments], timeout, env=environment)


def output_of(module: str, *arguments: object, timeout: float = 300) -> str:
    """Returns what `python -m module arguments` has printed. It must have succeeded."""
    done = run_module(module, *arguments, timeout=timeout)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def end_with_descendants(process: int) -> None:
    """Kills a process, and what it has started."""
    with contextlib.suppress(OSError):
        for children in Path(f"/proc/{process}/task").glob("*/children"):
            for child in map(int, children.read_text().split()):
                end_with_descendants(child)
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, signal.SIGKILL)


@contextlib.contextmanager
def children_forked() -> Iterator[None]:
    """Forks what this process starts by `subprocess` within a block, too."""
    with mock.patch.object(subprocess, "Popen", Program):
        yield
