"""Injection of faults: a function of the phase is wrapped in the rank that is to fail."""

from __future__ import annotations

import functools
import os
import pkgutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SLOW_S = 1.5
"""Instead of 10 s: so much longer than a phase takes, and so much shorter than the group's timeout, are both."""
RESULTS, CHECKPOINT, FILLER = "DBSP_FAULT_RESULTS", "DBSP_FAULT_CHECKPOINT", ".filler"
"""Environment variables of `dbsp generate`: folders of results and of a checkpoint; and what a disk is filled with."""
FAULT = "DBSP_FAULT"
"""Environment variable of its ranks: a folder for signs, and the fields of an `Injection`."""
_REFERENCE = ContextVar("reference", default=False)


@contextmanager
def reference() -> Iterator[None]:
    """Counts no call of what runs inside: a rank computes by itself what is right, and no other waits for it."""
    token = _REFERENCE.set(True)
    try:
        yield
    finally:
        _REFERENCE.reset(token)


@dataclass(frozen=True)
class Injection:
    """An act in the nth call of a function, in one rank."""

    act: str
    rank: int
    target: str
    nth: int = 1

    def arm(self, rank: int, folder: Path) -> None:
        """Wraps the function in the rank, before the phase. folder: gets a file "fired" with the time of it"""
        if rank != self.rank:
            return
        owner, _, name = self.target.rpartition(".")
        holder = pkgutil.resolve_name(owner)
        raw = vars(holder)[name]
        function, calls = getattr(holder, name), 0

        @functools.wraps(function)
        def wrapped(*args: Any, **options: Any) -> Any:
            nonlocal calls
            if not _REFERENCE.get():
                calls += 1
                if calls == self.nth:
                    fire(self.act, folder)
            return function(*args, **options)

        setattr(holder, name, staticmethod(wrapped) if isinstance(raw, (staticmethod, classmethod)) else wrapped)


def fire(act: str, folder: Path) -> None:
    sign = folder / "fired"
    sign.with_suffix(".new").write_text(repr(time.monotonic()), encoding="utf-8")
    sign.with_suffix(".new").replace(sign)
    ACTS[act]()


def _raise(make: Callable[[], BaseException]) -> Callable[[], None]:
    def act() -> None:
        raise make()

    return act


def _out_of_memory() -> BaseException:
    import torch

    return torch.OutOfMemoryError("injected: CUDA out of memory")


def _fill_the_disk() -> None:
    """Fills the disk of the case's results; if they have none of their own, raises what a full one raises."""
    results = Path(os.environ[RESULTS])
    if not os.path.ismount(results):
        raise OSError(28, "No space left on device", "injected")
    with suppress(OSError), (results / FILLER).open("wb", buffering=0) as file:
        for size in (1 << 20, 1 << 12, 1):
            with suppress(OSError):
                while True:
                    file.write(b"x" * size)


def _damage(how: Callable[[Path], None]) -> Callable[[], None]:
    def act() -> None:
        for path in (Path(os.environ[CHECKPOINT]) / "transformer").glob("*.safetensors"):
            how(path)

    return act


def _signal(number: signal.Signals) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


ACTS: dict[str, Callable[[], None]] = {
    "kill": _signal(signal.SIGKILL),
    "stop": _signal(signal.SIGSTOP),
    "raise": _raise(lambda: RuntimeError("injected: a fault")),
    "out of memory": _raise(_out_of_memory),
    "out of CPU memory": _raise(lambda: MemoryError("injected: no memory")),
    "slow": lambda: time.sleep(SLOW_S),
    "interrupt": _signal(signal.SIGINT),
    "terminate": _signal(signal.SIGTERM),
    "hang": lambda: time.sleep(3600),
    "go on": lambda: None,
    "kill torchrun": lambda: os.kill(os.getppid(), signal.SIGKILL),
    "disk fills": _fill_the_disk,
    "weights vanish": _damage(lambda path: path.unlink()),
    "weights are truncated": _damage(lambda path: os.truncate(path, path.stat().st_size // 2)),
    "disk full": _raise(lambda: OSError(28, "No space left on device", "injected")),
    "read-only": _raise(lambda: OSError(30, "Read-only file system", "injected")),
}


def variables(folder: Path, injection: Injection) -> dict[str, str]:
    """Returns the environment of ranks of `dbsp generate` in which this program replaces the command's own."""
    return {FAULT: "|".join(map(str, (folder, injection.act, injection.rank, injection.target, injection.nth)))}


def _be_a_rank() -> None:
    """Runs `dbsp`, after a function was wrapped."""
    from dbsp_cli.entry import dbsp

    folder, act, rank, target, nth = os.environ[FAULT].split("|")
    Injection(act, int(rank), target, int(nth)).arm(int(os.environ["RANK"]), Path(folder))
    dbsp()


if __name__ == "__main__":
    _be_a_rank()
