"""Keepers: each forks the processes of a case, watches them to their end, cleans up, and judges what it saw.

A keeper is a process of Python's own fork server, which has imported everything.
"""

from __future__ import annotations

import ctypes
import functools
import json
import multiprocessing
import os
import signal
import tempfile
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path

from tests.support.programs.ending import run_to_its_end

PATIENCE_S = 120.0
"""Ends a case in which the fault never happens."""
LATE = "late"
NEVER = ("terminate called", "Fatal Python error", "Segmentation fault", "core dumped", "Aborted")
_POLL_S = 0.02
_PR_SET_CHILD_SUBREAPER = 36
_CLONE_NEWNS = 0x00020000


@dataclass
class Ended:
    """End of a case's processes. Times are seconds after the fault, or after the start where none happened.

    codes: of exit, by process, negative for a signal; None where it had to be killed
    seconds: until each process ended;  errors, outputs: the end of what each wrote to standard error and output
    results: what each left as its result;  orphans: commands of processes that outlived all others
    left: files in the case's own temporary folder and /dev/shm
    """

    fired: bool
    codes: list[int | None]
    seconds: list[float]
    errors: list[str]
    outputs: list[str]
    results: list[str | None]
    orphans: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)


class Fault(ABC):
    """Something that goes wrong in processes, and how they must end.

    processes: their number
    limit_s: from when the fault happens, until all must have ended;  odd, odd_limit_s: one that may take longer
    stopped: the process that will hang
    sent:    signal that the first process gets when the fault happens
    after_s: beyond the limit, before all is killed: what is late is distinguished from what hangs
    ends_by: what a process says that may be ended by a library; "" for none
    """

    processes: int
    limit_s: float
    odd: int
    odd_limit_s = 0.0
    stopped: int | None = None
    sent: signal.Signals | None = None
    after_s = 12.0
    ends_by: str = ""

    @abstractmethod
    def main(self, number: int, folder: Path) -> None:
        """Runs in each process."""

    @abstractmethod
    def message_about(self, ended: Ended, folder: Path) -> str | None:
        """Returns what is wrong with the end, or None. folder: of the case, where a disk of its own is still there"""

    def failure(self, ended: Ended, folder: Path) -> str | None:
        """Returns what is wrong with the end as with any case's, or with this one's, or None."""
        found = [f"process {number} hangs" for number, code in enumerate(ended.codes) if code is None]
        found += [
            f"{LATE}: process {number} ended after {seconds:.1f} s"
            for number, seconds in enumerate(ended.seconds)
            if ended.fired and seconds > (max(self.limit_s, self.odd_limit_s) if number == self.odd else self.limit_s)
        ]
        found += [f"an orphan: {orphan[:200]}" for orphan in ended.orphans]
        found += [f"left behind: {name}" for name in ended.left]
        looked_at = [n for n, text in enumerate(ended.errors) if not (self.ends_by and self.ends_by in text)]
        found += [f"process {n}: {word}" for n in looked_at for word in NEVER if word in ended.errors[n]]
        return found[0] if found else self.message_about(ended, folder)


def start_keeper(case: Fault, folder: Path, preloaded: Sequence[str] = ()) -> BaseProcess:
    """Starts a keeper. preloaded: modules that the fork server imports, where there is none yet"""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(preloaded))
    process = context.Process(target=_keep, args=(case, folder))
    process.start()
    return process


def wait_for(keeper: BaseProcess, folder: Path) -> tuple[str | None, float]:
    """Returns what a keeper found wrong, and the seconds from the fault until all had ended."""
    keeper.join(2 * PATIENCE_S)
    if keeper.exitcode != 0:
        keeper.kill()
        return "what watches the processes is gone", 0.0
    failure, seconds = json.loads((folder / "found.json").read_text(encoding="utf-8"))
    return failure, seconds


def _keep(case: Fault, folder: Path) -> None:
    """Runs a keeper, which ends here, as do its processes."""
    # Where nohup or a shell's background has them ignored, cases would inherit that, and dbsp respects it.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    seconds = 0.0
    try:
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # orphans of the case become its own children
        private = _private_shm()
        (folder / "tmp").mkdir(parents=True)
        started, processes = time.monotonic(), []
        for number in range(case.processes):
            process = os.fork()
            if process == 0:
                _become(number, folder)
                run_to_its_end(functools.partial(case.main, number, folder))
            processes.append(process)
        ended = _watch(case, folder, processes, started)
        ended.orphans = _end_orphans()
        ended.left = [f"tmp/{path.relative_to(folder / 'tmp')}" for path in (folder / "tmp").rglob("*")]
        ended.left += [f"/dev/shm/{name}" for name in os.listdir("/dev/shm")] if private else []
        failure, seconds = case.failure(ended, folder), max(ended.seconds) if ended.fired else 0.0
    except BaseException:
        failure = traceback.format_exc()
    (folder / "found.json").write_text(json.dumps([failure, seconds]), encoding="utf-8")
    os._exit(0)


def _become(number: int, folder: Path) -> None:
    """Becomes a process of a case: its own session, output in files, its own folder for temporary files."""
    os.setsid()
    multiprocessing.set_start_method(None, force=True)  # a program's own, which is not the keeper's
    os.environ["TMPDIR"] = str(folder / "tmp")
    tempfile.tempdir = None
    for stream, name in ((1, "out"), (2, "err")):
        file = os.open(folder / f"{name}{number}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, stream)
        os.close(file)


def _private_shm() -> bool:
    """Gives this process, and those it starts, a /dev/shm of their own. Returns False where that is not allowed."""
    c = ctypes.CDLL(None)
    if c.unshare(_CLONE_NEWNS) != 0:
        return False
    c.mount(b"none", b"/", None, 0x44000, None)  # MS_REC | MS_PRIVATE
    return bool(c.mount(b"tmpfs", b"/dev/shm", b"tmpfs", 0, None) == 0)


def _text(path: Path) -> str | None:
    return path.read_text(errors="replace", encoding="utf-8") if path.exists() else None


def _watch(case: Fault, folder: Path, processes: list[int], started: float) -> Ended:
    """Waits until all processes have ended, one that was stopped last of all, or have been killed."""
    codes: list[int | None] = [None] * len(processes)
    ends, running = [0.0] * len(processes), dict(enumerate(processes))
    fired: str | None = None
    continued: float | None = None
    while running:
        now = time.monotonic()
        if fired is None and (fired := _text(folder / "fired")) and case.sent is not None and 0 in running:
            os.kill(running[0], case.sent)
        for number, process in list(running.items()):
            done, status = os.waitpid(process, os.WNOHANG)
            if done:
                codes[number], ends[number] = os.waitstatus_to_exitcode(status), now
                del running[number]
        if fired and list(running) == [case.stopped] and continued is None:
            continued = now
            os.kill(running[case.stopped], signal.SIGCONT)
        if now > ((continued or float(fired)) + case.limit_s + case.after_s if fired else started + PATIENCE_S):
            for number, process in running.items():
                os.kill(process, signal.SIGKILL)
                os.waitpid(process, 0)
                ends[number] = now
            break
        time.sleep(_POLL_S)
    fired = fired or _text(folder / "fired")  # it may have been the last act of all
    since = [continued if number == case.stopped else None for number in range(len(processes))]
    return Ended(
        fired is not None,
        codes,
        [round(end - (one or float(fired or started)), 2) for end, one in zip(ends, since, strict=True)],
        *([(_text(folder / f"{name}{n}") or "")[-8000:] for n in range(len(processes))] for name in ("err", "out")),
        [_text(folder / f"result{n}") for n in range(len(processes))],
    )


def _end_orphans() -> list[str]:
    """Kills what is left of a case's processes, unless they end by themselves. Returns their commands."""
    orphans, end = [], time.monotonic() + 0.1
    while True:
        try:
            process, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return orphans
        if not process and time.monotonic() > end:
            for child in Path(f"/proc/self/task/{os.getpid()}/children").read_text(encoding="utf-8").split():
                command = Path(f"/proc/{child}/cmdline").read_text(encoding="utf-8").replace("\0", " ").strip()
                orphans += [command] if command else []  # what has ended has none
                os.kill(int(child), signal.SIGKILL)
        time.sleep(0 if process else _POLL_S)
