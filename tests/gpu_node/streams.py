"""Streams and events of simulated devices, and the order that waits between them establish.

Work runs at once, in the order in which it is submitted, so values are always those of a correctly ordered program.
What is checked is that CUDA would have to order it so: an operator that reads what another stream wrote, or overwrites
what another stream reads or wrote, needs a wait between the two.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from tests.gpu_node.faults import DeviceFault, recorded

Clock = dict[tuple[int, int], int]
"""By stream, as (device, id): how many of its operators have been waited for."""

_HERE = threading.local()
_runtime: Any = None
_lock = threading.RLock()
_submitted: Clock = {}
"""By stream: number of operators that were submitted to it."""
_waited: dict[tuple[int, int], Clock] = {}
"""By stream: what its next operator comes after."""
_ids = itertools.count(1)
_late: dict[tuple[int, int], list[tuple[int, Callable[[], None]]]] = {}
"""By stream: copies to the host that are not there yet, with the number of the operator."""


def use_runtime(runtime: Any) -> None:
    """Sets the library that keeps the current device and streams of each thread."""
    global _runtime
    _runtime = runtime


def current_device() -> int:
    device: int = _runtime.get_device()
    return device


def set_device(device: torch.device | int | str) -> None:
    index = device if isinstance(device, int) else torch.device(device).index
    if index is not None and index >= 0:
        require_own(index, "set_device")
        _runtime.set_device(index)


def own(device: int | None) -> None:
    """Lets this thread and those that it starts touch no other device from now on. None: any."""
    _HERE.own = device


@contextmanager
def owning(device: int | None) -> Iterator[None]:
    """Lets this thread and those that it starts touch no other device within a block."""
    before = own_device()
    own(device)
    try:
        yield
    finally:
        own(before)


def own_device() -> int | None:
    """Returns the only device that this thread may touch; None: any."""
    return getattr(_HERE, "own", None)


def require_own(index: int, what: str) -> None:
    """Raises DeviceFault if a context would be created on another rank's device."""
    mine = own_device()
    if mine is not None and index != mine:
        raise DeviceFault(f"{what}: a context on cuda:{index}, in a thread of the rank on cuda:{mine}")


class Stream:
    """Replaces torch.cuda.Stream."""

    def __init__(
        self, device: torch.device | int | str | None = None, priority: int = 0, *, number: int | None = None
    ):
        index = device if isinstance(device, int) else None if device is None else torch.device(device).index
        index = current_device() if index is None else index
        require_own(index, "a stream")
        self.device = torch.device("cuda", index)
        self.stream_id = next(_ids) if number is None else number
        self.priority = priority

    @property
    def key(self) -> tuple[int, int]:
        return self.device.index, self.stream_id

    @property
    def cuda_stream(self) -> int:
        return self.stream_id

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and other.key == self.key

    def __hash__(self) -> int:
        return hash(self.key)

    def __repr__(self) -> str:
        return f"<simulated stream {self.stream_id} of {self.device}>"

    def __enter__(self) -> Stream:
        self._outer = on_stream(self)
        self._outer.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._outer.__exit__(*error)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        _come_after(self.key, event.clock)

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def synchronize(self) -> None:
        recorded.host_wait("Stream.synchronize")
        host_waits_for(_clock_of(self.key))

    def query(self) -> bool:
        host_waits_for(_clock_of(self.key))
        return True


class Event:
    """Replaces torch.cuda.Event."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.clock: Clock = {}
        self.time = 0.0
        self.step = 0

    def record(self, stream: Stream | None = None) -> None:
        self.clock, self.time = _clock_of((stream or current_stream()).key), time.perf_counter()
        self.step = recorded.steps

    def wait(self, stream: Stream | None = None) -> None:
        (stream or current_stream()).wait_event(self)

    def synchronize(self) -> None:
        recorded.host_wait("Event.synchronize", past=self.step < recorded.steps)
        host_waits_for(self.clock)

    def query(self) -> bool:
        host_waits_for(self.clock)
        return True

    def elapsed_time(self, end: Event) -> float:
        return 1000.0 * max(end.time - self.time, 1e-6)


def current_stream(device: torch.device | int | str | None = None) -> Stream:
    index = device if isinstance(device, int) else None if device is None else torch.device(device).index
    index = current_device() if index is None else index
    return Stream(index, number=_runtime.get_stream(index))


@contextmanager
def on_stream(stream: Stream | None) -> Iterator[None]:
    """Makes a stream current on its device, and its device current, as torch.cuda.stream does."""
    if stream is None:
        yield
        return
    index, device = stream.device.index, current_device()
    before = _runtime.get_stream(index)
    _runtime.set_device(index)
    _runtime.set_stream(index, stream.stream_id)
    try:
        yield
    finally:
        _runtime.set_stream(index, before)
        _runtime.set_device(device)


@dataclass(eq=False)
class Memory:
    """One allocation on a device.

    Attributes:
        written: Stream and number of the operator that wrote it last.
        read: By stream, the number of the last operator that read it.
    """

    device: int
    bytes: int
    written: tuple[tuple[int, int], int] | None = None
    read: Clock = field(default_factory=dict)


def submit(device: int, reads: list[Memory], writes: list[Memory], what: str) -> int:
    """Submits an operator to the device's current stream. Returns its number.

    Raises:
        DeviceFault: If no wait orders it after what it depends on.
    """
    key = device, _runtime.get_stream(device)
    with _lock:
        known = _waited.setdefault(key, {})
        for stream, number in _of_host().items():
            known[stream] = max(known.get(stream, 0), number)
        for memory in (*reads, *writes):
            if memory.written is not None:
                _require(key, known, *memory.written, f"{what} uses what was written")
        for memory in writes:
            for stream, number in memory.read.items():
                _require(key, known, stream, number, f"{what} overwrites what is read")
        _submitted[key] = number = _submitted.get(key, 0) + 1
        for memory in reads:
            memory.read[key] = number
        for memory in writes:
            memory.written, memory.read = (key, number), {}
    return number


def later(device: int, number: int, do: Callable[[], None]) -> None:
    """Does something once the host has waited for an operator of the device's current stream."""
    with _lock:
        _late.setdefault((device, _runtime.get_stream(device)), []).append((number, do))


def host_waits_for(clock: Clock) -> None:
    """Lets this thread's next operators come after what a clock has; copies to the host are there then."""
    with _lock:
        host = _of_host()
        for stream, number in clock.items():
            host[stream] = max(host.get(stream, 0), number)
            waiting = _late.get(stream, [])
            _late[stream] = [one for one in waiting if one[0] > number]
            for one in waiting:
                if one[0] <= number:
                    one[1]()


def host_waits_for_device(device: int) -> None:
    with _lock:
        clock: Clock = {}
        for key in [key for key in _submitted if key[0] == device]:
            clock |= _clock_of(key)
    host_waits_for(clock)


def host_waits_for_current_stream(device: int) -> None:
    host_waits_for(_clock_of((device, _runtime.get_stream(device))))


def _of_host() -> Clock:
    clock: Clock | None = getattr(_HERE, "clock", None)
    if clock is None:
        clock = _HERE.clock = {}
    return clock


def _clock_of(key: tuple[int, int]) -> Clock:
    with _lock:
        return _waited.get(key, {}) | {key: _submitted.get(key, 0)}


def _come_after(key: tuple[int, int], clock: Clock) -> None:
    with _lock:
        known = _waited.setdefault(key, {})
        for stream, number in clock.items():
            known[stream] = max(known.get(stream, 0), number)


def _require(key: tuple[int, int], known: Clock, stream: tuple[int, int], number: int, what: str) -> None:
    # Work of another device's streams is ordered by the group that brings it over.
    if stream[0] == key[0] and stream != key and known.get(stream, 0) < number:
        raise DeviceFault(f"{what} on stream {stream[1]} of cuda:{stream[0]}, without a wait, on stream {key[1]}")
