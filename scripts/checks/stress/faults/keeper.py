"""Keepers: each forks the processes of a case, watches them to their end, cleans up, and leaves what it saw.

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
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from tests.support.programs.ending import run_to_its_end

PATIENCE_S = 120.0
"""Ends a case in which the fault never happens."""
_POLL_S = 0.02
_PR_SET_CHILD_SUBREAPER = 36
_CLONE_NEWNS = 0x00020000


@dataclass(frozen=True)
class Task:
    """main: called in each process with (argument, number, folder)

    limit_s: from when the fault happens, until all must have ended;  stopped: the process that will hang
    sent:   signal that the first process gets when the fault happens
    check:  says what is wrong with what (argument, folder) is left, seen from where a disk of the case's own is
    after_s: beyond the limit, before all is killed: what is late is distinguished from what hangs
    """

    main: Callable[[Any, int, Path], None]
    argument: Any
    processes: int
    limit_s: float
    stopped: int | None = None
    sent: signal.Signals | None = None
    after_s: float = 12.0
    check: Callable[[Any, Path, Ended], str | None] | None = None


@dataclass
class Ended:
    """Findings of a keeper. Times are seconds after the fault, or after the start where none happened.

    codes: of exit, by process, negative for a signal; None where it had to be killed
    seconds: until each process ended;  errors, outputs: the end of what each wrote to standard error and output
    results: what each left as its result;  orphans: commands of processes that outlived all others
    left: files in the case's own temporary folder and /dev/shm
    message: the task's own;  trouble: why all this is not known
    """

    fired: bool = False
    codes: list[int | None] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    results: list[str | None] = field(default_factory=list)
    orphans: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    message: str | None = None
    trouble: str | None = None


def keep(task: Task, folder: Path) -> None:
    """Runs a keeper, which ends here, as do its processes."""
    # Where nohup or a shell's background has them ignored, cases would inherit that, and dbsp respects it.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    ended = Ended()
    try:
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # orphans of the case become its own children
        private = _private_shm()
        (folder / "tmp").mkdir(parents=True)
        started, processes = time.monotonic(), []
        for number in range(task.processes):
            process = os.fork()
            if process == 0:
                _become(number, folder)
                run_to_its_end(functools.partial(task.main, task.argument, number, folder))
            processes.append(process)
        ended = _watch(task, folder, processes, started)
        ended.orphans = _end_orphans(task.limit_s if task.sent is signal.SIGKILL else 0.1)
        ended.message = task.check and task.check(task.argument, folder, ended)
        ended.left = [f"tmp/{path.relative_to(folder / 'tmp')}" for path in (folder / "tmp").rglob("*")]
        ended.left += [f"/dev/shm/{name}" for name in os.listdir("/dev/shm")] if private else []
    except BaseException:
        ended.trouble = traceback.format_exc()
    (folder / "ended.json").write_text(json.dumps(asdict(ended)), encoding="utf-8")
    os._exit(0)


def start_keeper(task: Task, folder: Path, preloaded: Sequence[str] = ()) -> BaseProcess:
    """Starts a keeper. preloaded: modules that the fork server imports, where there is none yet"""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(preloaded))
    process = context.Process(target=keep, args=(task, folder))
    process.start()
    return process


def wait_for(keeper: BaseProcess, folder: Path) -> Ended:
    """Returns a keeper's findings."""
    keeper.join(2 * PATIENCE_S)
    if keeper.exitcode != 0:
        keeper.kill()
        return Ended(trouble="what watches the processes is gone")
    return Ended(**json.loads((folder / "ended.json").read_text(encoding="utf-8")))


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


def _time_of_fault(folder: Path) -> float | None:
    """Returns the time by the monotonic clock, or None before it has happened."""
    sign = folder / "fired"
    return float(sign.read_text(encoding="utf-8")) if sign.exists() else None


def _watch(task: Task, folder: Path, processes: list[int], started: float) -> Ended:
    """Waits until all processes have ended, one that was stopped last of all, or have been killed."""
    count = len(processes)
    codes: list[int | None] = [None] * count
    times, running = [0.0] * count, dict(enumerate(processes))
    fired: float | None = None
    continued: float | None = None
    while running:
        now = time.monotonic()
        if fired is None:
            fired = _time_of_fault(folder)
            if fired is not None and task.sent is not None and 0 in running:
                os.kill(running[0], task.sent)
        for number, process in list(running.items()):
            done, status = os.waitpid(process, os.WNOHANG)
            if done:
                fired = _time_of_fault(folder) if fired is None else fired  # it may have been this process's last act
                codes[number] = os.waitstatus_to_exitcode(status)
                times[number] = now - (continued if number == task.stopped and continued else fired or started)
                del running[number]
        if fired and task.stopped in running and len(running) == 1 and continued is None:
            continued = now
            os.kill(running[task.stopped], signal.SIGCONT)
        over = (continued or fired) + task.limit_s + task.after_s if fired else started + PATIENCE_S
        if now > over:
            for number, process in running.items():
                os.kill(process, signal.SIGKILL)
                os.waitpid(process, 0)
                times[number] = now - (fired or started)
            break
        time.sleep(_POLL_S)
    result = Ended(fired is not None, codes, [round(one, 2) for one in times])
    for number in range(count):
        for name, texts in (("err", result.errors), ("out", result.outputs)):
            texts.append((folder / f"{name}{number}").read_text(errors="replace", encoding="utf-8")[-8000:])
        file = folder / f"result{number}"
        result.results.append(file.read_text(encoding="utf-8") if file.exists() else None)
    return result


def _end_orphans(within_s: float) -> list[str]:
    """Kills what is left of a case's processes, unless they end by themselves. Returns their commands."""
    orphans, end = [], time.monotonic() + within_s
    while True:
        try:
            process, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return orphans
        if process or time.monotonic() < end:
            time.sleep(0 if process else _POLL_S)
            continue
        children = Path(f"/proc/self/task/{os.getpid()}/children").read_text(encoding="utf-8").split()
        for child in map(int, children):
            state = Path(f"/proc/{child}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
            if state not in "ZX":
                orphans.append(Path(f"/proc/{child}/cmdline").read_text(encoding="utf-8").replace("\0", " ").strip())
            os.kill(child, signal.SIGKILL)
        time.sleep(_POLL_S)
