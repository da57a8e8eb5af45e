"""Timing: contenders interleaved, over rotated inputs and a flushed L2 cache, medians."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

import torch

LEAD = 10_000_000
"""Cycles that the GPU is kept busy before a measurement: five milliseconds, in which Python gets ahead of it."""
FLUSHED = 256 << 20
"""Bytes that are written before a measurement, several times the largest L2 cache."""

Work = Callable[[int], object]
"""Does its work once; the argument counts up, and picks one of several sets of inputs."""


class Sampler:
    """Times works on a device: by CUDA events on a GPU, by the clock elsewhere."""

    def __init__(self, device: str, samples: int) -> None:
        self.device = device
        self.samples = samples
        self._on_gpu = torch.device(device).type == "cuda" and torch.cuda.is_available()
        self._flush = torch.empty(FLUSHED, dtype=torch.int8, device=device) if self._on_gpu else None

    def medians(self, works: Mapping[str, Work]) -> dict[str, float]:
        """Measures the median milliseconds of each, warmed up and round-robin, so that a drifting clock hits all."""
        for work in works.values():
            for warm_up in range(min(2, self.samples)):
                work(warm_up)
        self._wait()
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
            self._wait()
            start = time.perf_counter()
            work(sample)
            found.append((time.perf_counter() - start) * 1e3)
        return statistics.median(found)

    def _once(self, work: Work, sample: int) -> float:
        if self._flush is None:
            start = time.perf_counter()
            work(sample)
            return (time.perf_counter() - start) * 1e3
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._flush.zero_()
        # The first event is recorded while the GPU is busy: on an idle stream it would be over at once, and the time
        # that Python takes to launch the work would count.
        torch.cuda._sleep(LEAD)
        first.record()
        work(sample)
        last.record()
        last.synchronize()
        return float(first.elapsed_time(last))

    def _wait(self) -> None:
        if self._on_gpu:
            torch.cuda.synchronize()
