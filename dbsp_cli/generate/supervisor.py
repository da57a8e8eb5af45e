"""Runs torchrun and its ranks, follows their output, and ends every process, however the run ends."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import NoReturn

from dbsp_cli.generate.launch import Rendezvous
from dbsp_cli.generate.rank_output import STARTING, LogFollower, RunFailed, failure_of, new_log, reword_log
from dbsp_core.utils.process import NOTICE
from dbsp_start.parents import with_parent

__all__ = ["end_cleanly_on_signals", "run_watched"]

RUN = "DBSP_RUN"
"""Environment variable that all processes of one run inherit: the run's name, which no other run has."""
_SENDS_SIGTERM = re.compile(r"Sending process (\d+) closing signal")
_GRACE_S = 1.5  # for torchrun to end its ranks, which have nothing to save; then all of them are killed
_KILL_TRIES, _KILL_PAUSE_S = 100, 0.05
_SIGNALS = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]


def end_cleanly_on_signals() -> None:
    """Makes SIGTERM, and SIGHUP from a terminal that was closed, raise SystemExit(128 + signal) once.

    A signal that was ignored when this process began, as with nohup, stays ignored.
    """
    terminals = [stream for stream in (1, 2) if os.isatty(stream)]

    def end(number: int, frame: object) -> NoReturn:
        for other in _SIGNALS:
            signal.signal(other, signal.SIG_IGN)  # cleaning up takes a bounded time, and must not be cut short
        if number != signal.SIGTERM:  # the terminal is gone, and writing to it fails
            nowhere = os.open(os.devnull, os.O_WRONLY)
            for stream in terminals:
                with suppress(OSError):
                    os.dup2(nowhere, stream)
        raise SystemExit(128 + number)

    for number in _SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, end)


def run_watched(
    command: Sequence[str],
    log: Path,
    ranks_folder: Path,
    follower: LogFollower,
    environment: Mapping[str, str] | None = None,
    rendezvous: Rendezvous | None = None,
) -> None:
    """Runs a command that starts ranks with torchrun. All output goes to `log`, nothing to the terminal.

    However this ends, also by an interrupt or by torchrun's own end, no rank outlives it. On Linux none outlives
    this process either.

    Args:
        ranks_folder: Folder for torchrun's own logs. Its name is the run's name.
        environment: Variables to set besides this process's.
        rendezvous: Where its torchrun meets those of other nodes.

    Raises:
        UserError: A rank found a mistake of the user's.
        RunFailed: A rank failed otherwise.
    """
    run = str(ranks_folder)
    variables = {
        "TQDM_MININTERVAL": "0",
        **os.environ,
        **(environment or {}),
        "PYTHONUNBUFFERED": "1",
        "PYTHONIOENCODING": "utf-8:backslashreplace",
        "PYTHONSAFEPATH": "1",  # for processes that ranks start
        "PET_TEE": "3",
        "PET_LOG_DIR": str(ranks_folder),
        RUN: run,
        "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "(rank ${rank}) ",
    }
    with new_log(log) as file:
        process = subprocess.Popen(
            with_parent(command),
            env=variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            follower.stage(STARTING)
            tell = lambda line: follower.on_notice(f"{NOTICE}{line}")  # noqa: E731
            with rendezvous.watched(ranks_folder, tell) if rendezvous else nullcontext():
                _follow(process, file.write, follower, run)
            code = process.wait()
        finally:
            try:
                _end(process)
            finally:
                _kill_run(run)
                file.close()
                with suppress(OSError):  # such as of a full disk
                    reword_log(log, follower.reword)
    if code != 0:
        not_met = rendezvous.complaint(ranks_folder, "\n".join(follower.last_lines[""])) if rendezvous else None
        raise RunFailed(f"{not_met}; torchrun's output is in {log}") if not_met else failure_of(code, log, follower)


def _follow(
    process: subprocess.Popen[bytes], keep: Callable[[bytes], object], follower: LogFollower, run: str
) -> None:
    if process.stdout is None:
        raise RuntimeError("the ranks' output could not be read")
    begun = ""
    while chunk := process.stdout.read1(1 << 16):  # type: ignore[attr-defined]  # a BufferedReader has it
        keep(chunk)
        *lines, begun = re.split(r"[\r\n]+", begun + chunk.decode(errors="replace"))
        for line in lines:
            follower.line(line)
            for rank_process in map(int, _SENDS_SIGTERM.findall(line)):
                _end_soon(rank_process, run)
        if follower.rank == "0" or begun.startswith("(rank 0) "):  # a progress bar's line ends when it is drawn again
            follower.progress(begun)
    follower.line(begun)


def _end_soon(process: int, run: str) -> None:
    """Ends a rank that torchrun has sent SIGTERM; torchrun would wait 30 s for a rank that is stopped."""
    _signal_of_run(process, run, signal.SIGCONT)
    later = threading.Timer(_GRACE_S, _signal_of_run, [process, run, signal.SIGKILL])
    later.daemon = True
    later.start()


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends torchrun by SIGTERM, at which it ends its ranks; they are in process groups of their own."""
    if process.poll() is not None:
        return
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    try:
        process.communicate(timeout=_GRACE_S)
    except BaseException as error:  # it takes too long, or the user won't wait
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if not isinstance(error, subprocess.TimeoutExpired):
            raise


def _kill_run(run: str) -> None:
    """Kills what is left of a run, and returns once none is there, or none that can be killed.

    A rank that outlives its torchrun is in a session of its own, and only the variable that it inherited leads to
    it. Needs /proc; elsewhere it does nothing.
    """
    for _ in range(_KILL_TRIES):
        processes = (int(path.parent.name) for path in Path("/proc").glob("[0-9]*/environ"))
        if not sum(_signal_of_run(process, run, signal.SIGKILL) for process in processes):
            return
        time.sleep(_KILL_PAUSE_S)


def _signal_of_run(process: int, run: str, number: int) -> bool:
    """Sends a process a signal if it belongs to this run, and says whether it does."""
    with suppress(OSError):  # it has ended meanwhile, or is another user's; a zombie has none
        if f"{RUN}={run}".encode() in Path(f"/proc/{process}/environ").read_bytes().split(b"\0"):
            os.kill(process, number)
            return True
    return False
