"""Injection of faults: a function of the phase is wrapped in the rank that is to fail."""

from __future__ import annotations

import functools
import json
import os
import pkgutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import astuple, dataclass
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
    """Leaves a sign of the moment, and acts."""
    sign = folder / "fired"
    sign.with_suffix(".new").write_text(repr(time.monotonic()), encoding="utf-8")
    sign.with_suffix(".new").replace(sign)
    if act in RAISED:
        raise RAISED[act]()
    if act in SIGNALS:
        os.kill(os.getpid(), SIGNALS[act])
    else:
        OTHERS[act]()


def _out_of_memory() -> BaseException:
    import torch

    return torch.OutOfMemoryError("injected: CUDA out of memory")


def _fill_the_disk() -> None:
    """Fills the disk of the case's results; if they have none of their own, raises what a full one raises."""
    results = Path(os.environ[RESULTS])
    if not os.path.ismount(results):
        raise RAISED["disk full"]()
    with suppress(OSError), (results / FILLER).open("wb", buffering=0) as file:
        for size in (1 << 20, 1 << 12, 1):
            with suppress(OSError):
                while True:
                    file.write(b"x" * size)


def _halve(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def _damage_weights(how: Callable[[Path], None]) -> None:
    for path in (Path(os.environ[CHECKPOINT]) / "transformer").glob("*.safetensors"):
        how(path)


RAISED = {
    "raise": lambda: RuntimeError("injected: a fault"),
    "out of memory": _out_of_memory,
    "out of CPU memory": lambda: MemoryError("injected: no memory"),
    "disk full": lambda: OSError(28, "No space left on device", "injected"),
    "read-only": lambda: OSError(30, "Read-only file system", "injected"),
}
SIGNALS = {
    "kill": signal.SIGKILL,
    "stop": signal.SIGSTOP,
    "interrupt": signal.SIGINT,
    "terminate": signal.SIGTERM,
}
OTHERS = {
    "slow": lambda: time.sleep(SLOW_S),
    "go on": lambda: None,
    "disk fills": _fill_the_disk,
    "weights vanish": lambda: _damage_weights(Path.unlink),
    "weights are truncated": lambda: _damage_weights(_halve),
}
"""Acts, by their names in titles of cases."""


def variables(folder: Path, injection: Injection) -> dict[str, str]:
    """Returns the environment of ranks of `dbsp generate` in which this program replaces the command's own."""
    return {FAULT: json.dumps([str(folder), *astuple(injection)])}


def _be_a_rank() -> None:
    """Runs `dbsp`, after a function was wrapped."""
    from dbsp_cli.entry import dbsp

    folder, *fields = json.loads(os.environ[FAULT])
    Injection(*fields).arm(int(os.environ["RANK"]), Path(folder))
    dbsp()


if __name__ == "__main__":
    _be_a_rank()
