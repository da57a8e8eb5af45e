"""Timing in step with other ranks, on machines that others use too."""

from __future__ import annotations

import os
import pickle
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessException, start_processes

from dbsp_core.comm.process_groups import meet
from dbsp_diffusers.rank_program import process_group, use_local_device

__all__ = ["Sample", "Samples", "Timer", "run_ranks", "undisturbed_samples"]


class Sample(NamedTuple):
    """One repetition of what is timed. All in seconds."""

    elapsed: float
    waited: float
    """How long this thread was ready to run while another had its core."""
    on_core: float
    """How long this process ran on a core. Unlike `elapsed`, it does not depend on what else runs here."""


Samples = list[Sample]
"""One rank's repetitions."""

_QUIET = 0.05
"""Largest share of its time that a rank waits for a core in a quiet repetition."""
_LEAST_REPETITIONS = 3
_SCHEDULER = Path("/proc/thread-self/schedstat")  # Linux: nanoseconds run, nanoseconds waited for a core, slices
_MACHINE = Path("/proc/stat")


class Timer:
    """Takes the samples of one rank.

    Args:
        device: "cpu" or "cuda".
        max_wait_s: Seconds to wait, over all samples, for moments in which nothing else runs on this machine's CPU.
    """

    def __init__(self, device: str, max_wait_s: float = 0.0) -> None:
        self.device = device
        self._max_wait_s = max_wait_s

    def samples(self, action: Callable[[], object], repeats: int, warm_up: int = 1) -> Samples:
        """Times an action; all ranks begin each repetition together."""
        samples = []
        for repetition in range(warm_up + repeats):
            self._synchronize()
            if repetition >= warm_up and (not dist.is_initialized() or dist.get_rank() == 0):
                self._await_quiet()
            if dist.is_initialized():
                meet()
            waited, ran, start = _waited(), time.process_time(), time.perf_counter()
            action()
            self._synchronize()
            if repetition >= warm_up:
                seconds = time.perf_counter() - start
                samples.append(Sample(seconds, _waited() - waited, time.process_time() - ran))
        return samples

    def _await_quiet(self) -> None:
        start, quiet = time.perf_counter(), 0
        while quiet < 3 and time.perf_counter() - start < self._max_wait_s:
            quiet = quiet + 1 if _running() <= 1 else 0
            time.sleep(0.004)
        self._max_wait_s -= time.perf_counter() - start

    def _synchronize(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()


def undisturbed_samples(by_rank: Sequence[Samples]) -> np.ndarray:
    """float64[n]: the slowest rank's seconds in quiet repetitions, at least in the three most quiet ones.

    A repetition is quiet if no rank waited for its core for more than a twentieth of it.
    """
    samples = np.asarray(by_rank, dtype=np.float64)  # [ranks, repetitions, 3]
    seconds = samples[..., 0].max(axis=0)
    waited = samples[..., 1].max(axis=0) / np.maximum(seconds, 1e-12)
    enough = np.sort(waited)[: min(_LEAST_REPETITIONS, len(waited))].max()
    return seconds[waited <= max(_QUIET, enough)]


def _waited() -> float:
    try:
        return int(_SCHEDULER.read_text(encoding="utf-8").split()[1]) / 1e9
    except (OSError, IndexError, ValueError):  # not on Linux: every repetition counts as quiet
        return 0.0


def _running() -> int:
    """Threads that run or are ready to, this one included; 1 where the system does not say."""
    try:
        lines = _MACHINE.read_text(encoding="utf-8").splitlines()
    except OSError:
        return 1
    return next((int(line.split()[1]) for line in lines if line.startswith("procs_running")), 1)


_CPU_RANKS = {"OMP_NUM_THREADS": "1", "MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(16 << 30)}
"""Environment of ranks on a CPU: one core each; and glibc keeps freed memory, as GPU allocators do, instead of handing
large blocks back to the system, after which every call would pay for fresh pages."""


def run_ranks(function: Callable[..., Any], world: int, device: str, *args: Any) -> list[Any]:
    """Calls function(rank, world, *args) in `world` new processes of one process group.

    Args:
        function: Importable by its name.
        device: "cpu" (gloo, one thread a rank) or "cuda" (NCCL, one GPU a rank).

    Returns:
        The results by rank.

    Raises:
        RuntimeError: A rank failed or died; the message has its trace.
    """
    before = dict(os.environ)
    with tempfile.TemporaryDirectory() as folder:
        os.environ.update(_CPU_RANKS if device == "cpu" else {})  # for the new processes
        try:
            start_processes(
                _serve, (function, world, device, folder, args), nprocs=world, daemon=True, start_method="spawn"
            )
        except ProcessException as error:
            raise RuntimeError(f"rank {error.error_index} ended before it answered: {error}") from error
        finally:
            os.environ.clear()
            os.environ.update(before)
        return [pickle.loads(Path(folder, f"rank{rank}").read_bytes()) for rank in range(world)]


def _serve(rank: int, function: Callable[..., Any], world: int, device: str, folder: str, args: tuple) -> None:
    if device == "cpu":
        torch.set_num_threads(1)
    store = Path(folder, "store").as_posix()
    own = use_local_device(rank) if device == "cuda" else torch.device("cpu")
    with process_group(own, init_method=f"file://{store}", rank=rank, world_size=world):
        Path(folder, f"rank{rank}").write_bytes(pickle.dumps(function(rank, world, *args)))
        with suppress(RuntimeError):  # a rank that failed says so itself
            meet()
