"""Faults that CUDA would answer with an error, and what it would do slowly, each with the line under test."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[2]
_NOT_CALLERS = (str(_ROOT / "tests" / "gpu_node"), str(_ROOT / "tests" / "support"))


_PRODUCT = ("dbsp_", "kernels/")


class DeviceFault(RuntimeError):
    """Something that a CUDA device would reject, or get wrong."""


class Record:
    """Counts of what ran on the simulated devices since the last `clear`, over all threads.

    Attributes:
        host_waits: Waits of the host for a device, by "what at file:line"; those of threads that are no rank's own,
            whom nobody waits for, by "what in thread NAME at file:line".
        past_waits: Waits of the host, by line of code, for events from before the last `begin_step`: for work of an
            earlier step, which a device that keeps up has done.
        launches: Triton launches by kernel, and NCCL's collectives.
        operators: Operators of torch that compute on a device, by name; of ranks' own threads, as launches.
        variants: Of each kernel, the specialisations that its launches asked for.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.steps = 0
        self.clear()

    def clear(self) -> None:
        self.begin_step()
        self.variants: dict[str, set[object]] = {}

    def begin_step(self) -> None:
        """Counts waits, launches and operators from 0."""
        self.steps += 1
        self.host_waits: Counter[str] = Counter()
        self.past_waits: Counter[str] = Counter()
        self.launches: Counter[str] = Counter()
        self.operators: Counter[str] = Counter()

    def waits_of_product(self) -> dict[str, int]:
        """Returns the host waits of ranks' own threads in the product's files, by line of code."""
        waits = self.host_waits.items()
        return {
            at: times
            for at, times in waits
            if at.partition(" at ")[2].startswith(_PRODUCT) and " in thread " not in at
        }

    def host_wait(self, what: str, *, past: bool = False) -> None:
        line, thread = line_of_caller(), _worker_thread()
        what += f" in thread {thread}" if thread else ""
        with self._lock:
            (self.past_waits if past else self.host_waits)[f"{what} at {line}"] += 1

    def launch(self, kernel: str, variant: object) -> None:
        with self._lock:
            self.launches[kernel] += not _worker_thread()
            self.variants.setdefault(kernel, set()).add(variant)

    def operator(self, name: str) -> None:
        with self._lock:
            self.operators[name] += not _worker_thread()


recorded = Record()


def _worker_thread() -> str:
    """Returns the name of the current thread if the product has made it, else an empty one."""
    name = threading.current_thread().name
    return name if name.startswith("dbsp-") else ""


def line_of_caller() -> str:
    """Returns file:line of the innermost frame that is neither the simulation's nor torch's.

    It is in this repository, or in a library that the repository calls and that waits by itself, such as diffusers.
    """
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        _, _, library = name.rpartition("/site-packages/")
        if library == name:
            if name.startswith(str(_ROOT)) and not name.startswith(_NOT_CALLERS):
                return f"{Path(name).relative_to(_ROOT)}:{frame.f_lineno}"
        elif not library.startswith(("torch/", "triton/")):
            return f"{library}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return "elsewhere"
