"""Replacements of `subprocess` with which tests start programs."""

from __future__ import annotations

import atexit
import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from functools import cache
from multiprocessing.connection import Connection
from typing import Any
from unittest import mock

from tests.support.programs.command import Command, read_at_import
from tests.support.repository import ROOT, child_environment


class _Server:
    """This process's end of the server, which is started at first use, and ends with this process."""

    def __init__(self) -> None:
        self._ours, theirs = socket.socketpair()
        self.at_import = read_at_import(os.environ)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.programs.server", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"},
        )
        theirs.close()
        self._pipe = Connection(os.dup(self._ours.fileno()))
        self._lock = threading.Lock()
        atexit.register(self._close)

    def start(self, request: dict[str, Any], streams: Sequence[int]) -> tuple[int, int]:
        """Forks a program with these standard streams. Returns its number, and the file that its status comes from."""
        status, write = os.pipe()
        try:
            with self._lock:
                self._pipe.send(request)
                socket.send_fds(self._ours, [b"x"], [*streams, write])
                return self._pipe.recv(), status
        finally:
            os.close(write)

    def _close(self) -> None:
        self._pipe.close()
        self._ours.close()
        self._process.wait()


_server = cache(_Server)


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
        if command is None or read_at_import(environment) != _server().at_import:
            super()._execute_child(args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *rest)
            return
        streams = [own if given < 0 else given for own, given in enumerate((p2cread, c2pwrite, errwrite))]
        request = {
            "command": command,
            "environment": environment,
            "folder": os.path.abspath(cwd or "."),
            "new_session": new_session,
        }
        self.pid, self._status = _server().start(request, streams)
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
    from tests.support.programs.server import descendants

    for one in (process, *descendants(process)):
        with contextlib.suppress(ProcessLookupError):
            os.kill(one, signal.SIGKILL)


@contextlib.contextmanager
def children_forked() -> Iterator[None]:
    """Forks what this process starts by `subprocess` within a block, too."""
    with mock.patch.object(subprocess, "Popen", Program):
        yield
