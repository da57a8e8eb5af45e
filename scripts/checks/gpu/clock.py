"""Timing: contenders in turns, over rotated inputs, medians."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

__all__ = ["Sampler", "synchronize"]

LEAD = 2_000_000
"""Cycles that the GPU is kept busy before a measurement: a millisecond, in which Python gets ahead of it."""

Work = Callable[[int], object]
"""Does its work once; the argument counts up, and picks one of several sets of inputs."""


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


class Sampler:
    """Times works on a device: CUDA events on a GPU, the clock elsewhere."""

    def __init__(self, device: str, samples: int) -> None:
        self.device = device
        self.samples = samples

    def medians(self, works: dict[str, Work]) -> dict[str, float]:
        """Median milliseconds of each. All are warmed up, then run in turns, so that a clock that drifts hits all."""
        for work in works.values():
            for warm_up in range(min(2, self.samples)):
                work(warm_up)
        synchronize(self.device)
        times: dict[str, list[float]] = {name: [] for name in works}
        for sample in range(self.samples):
            for name, work in works.items():
                times[name].append(self._once(work, sample))
        return {name: statistics.median(found) for name, found in times.items()}

    def _once(self, work: Work, sample: int) -> float:
        if self.device != "cuda":
            start = time.perf_counter()
            work(sample)
            return (time.perf_counter() - start) * 1e3
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(LEAD)  # or the stream would be idle, and the time that Python takes to launch would count
        first.record()
        work(sample)
        last.record()
        last.synchronize()
        return float(first.elapsed_time(last))
