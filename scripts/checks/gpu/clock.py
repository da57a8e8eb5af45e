"""Timing: contenders interleaved, over rotated inputs and a flushed L2 cache, medians."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

import torch

LEAD = 10_000_000
"""Cycles that the GPU is kept busy before a measurement: five milliseconds, in which Python gets ahead of it."""
FLUSHED = 256 << 20  # bytes that are written before a measurement, several times the largest L2 cache

Work = Callable[[int], object]  # does its work once; the argument counts up, and picks one of several sets of inputs


class Sampler:
    """Times works on a device: by CUDA events on a GPU, by the clock elsewhere."""

    def __init__(self, device: str, samples: int) -> None:
        self.device = device
        self.samples = samples
        self._timeline = Timeline(device)
        on_gpu = self._timeline.on_gpu
        self._flush = torch.empty(FLUSHED, dtype=torch.int8, device=device) if on_gpu else None

    def medians(self, works: Mapping[str, Work]) -> dict[str, float]:
        """Measures the median milliseconds of each, warmed up and round-robin, so that a drifting clock hits all."""
        for work in works.values():
            for warm_up in range(min(2, self.samples)):
                work(warm_up)
        self._timeline.wait()
        times: dict[str, list[float]] = {name: [] for name in works}
        for sample in range(self.samples):
            for name, work in works.items():
                times[name].append(self._once(work, sample))
        return {name: statistics.median(found) for name, found in times.items()}

    def cpu_ms(self, work: Work) -> float:
        """Measures the median milliseconds until the CPU goes on, with nothing queued before."""
        work(0)
        found = []
        for sample in range(self.samples):
            self._timeline.wait()
            start = time.perf_counter()
            work(sample)
            found.append((time.perf_counter() - start) * 1e3)
        return statistics.median(found)

    def _once(self, work: Work, sample: int) -> float:
        if self._flush is not None:
            self._flush.zero_()
            # The first event is recorded while the GPU is busy: on an idle stream it would be over at once, and the
            # time that Python takes to launch the work would count.
            torch.cuda._sleep(LEAD)
        self._timeline.restart()
        work(sample)
        return self._timeline.total()


class Timeline:
    """Points in time: events on a GPU's stream, read when all is over, or the clock."""

    def __init__(self, device: str) -> None:
        self.on_gpu = torch.device(device).type == "cuda" and torch.cuda.is_available()
        self._points: list[torch.cuda.Event | float] = []

    def record(self) -> None:
        if not self.on_gpu:
            self._points.append(time.perf_counter() * 1e3)
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._points.append(event)

    def restart(self) -> None:
        self._points = []
        self.record()

    def between(self) -> list[float]:
        """Milliseconds between the points after the first one."""
        return [self._elapsed(a, b) for a, b in zip(self._points[1:], self._points[2:], strict=False)]

    def total(self) -> float:
        """Milliseconds since the first point, with all that is queued."""
        self.record()
        self.wait()
        return self._elapsed(self._points[0], self._points.pop())

    def wait(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()

    def _elapsed(self, a: torch.cuda.Event | float, b: torch.cuda.Event | float) -> float:
        if isinstance(a, float) or isinstance(b, float):
            return float(b) - float(a)
        return float(a.elapsed_time(b))
