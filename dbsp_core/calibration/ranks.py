"""Processes of our own in one group, for measuring: gloo with one core each, or NCCL with one GPU each."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["run_ranks"]

POLL_S = 0.5
CPU_RANKS = {"OMP_NUM_THREADS": "1", "MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(16 << 30)}
"""Environment of ranks on a CPU: one core each; and glibc keeps freed memory, as GPU allocators do, instead of handing
large blocks back to the system, after which every call would pay for fresh pages"""


def run_ranks(function: Callable[..., Any], world: int, device: str, *args: Any) -> list[Any]:
    """Calls function(rank, world, *args) in `world` new processes of one process group.

    function: importable by its name; device: "cpu" (gloo, one thread a rank) or "cuda" (NCCL, one GPU a rank)
    returns:  its results by rank. Raises RuntimeError with the trace of the first rank that fails or dies.
    """
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder, "store").as_posix()
        pipes, processes = [], []
        try:
            with _environment(**(CPU_RANKS if device == "cpu" else {})):
                for rank in range(world):
                    ours, theirs = context.Pipe()
                    process = context.Process(
                        target=_serve, args=(function, rank, world, device, store, theirs, args), daemon=True
                    )
                    process.start()
                    theirs.close()
                    pipes.append(ours)
                    processes.append(process)
            return [_answer(rank, *both) for rank, both in enumerate(zip(pipes, processes, strict=True))]
        finally:
            for process in processes:
                process.kill()
                process.join()


class _environment:
    """Variables that children inherit."""

    def __init__(self, **values: str) -> None:
        self._values = values
        self._before = {key: os.environ.get(key) for key in self._values}

    def __enter__(self) -> None:
        os.environ.update(self._values)

    def __exit__(self, *exception: object) -> None:
        for key, value in self._before.items():
            if value is None:
                del os.environ[key]
            else:
                os.environ[key] = value


def _answer(rank: int, pipe: Connection, process: Any) -> Any:
    while not pipe.poll(POLL_S):
        if not process.is_alive() and not pipe.poll(0):
            raise RuntimeError(f"rank {rank} ended with exit code {process.exitcode} before it answered")
    try:
        ok, value = pipe.recv()
    except EOFError:
        raise RuntimeError(f"rank {rank} ended before it answered") from None
    if not ok:
        raise RuntimeError(f"rank {rank} failed: {value}")
    return value


def _serve(
    function: Callable[..., Any], rank: int, world: int, device: str, store: str, pipe: Connection, args: tuple
) -> None:
    try:
        if device == "cuda":
            torch.cuda.set_device(rank)
        else:
            torch.set_num_threads(1)
        dist.init_process_group(
            "nccl" if device == "cuda" else "gloo", init_method=f"file://{store}", rank=rank, world_size=world
        )
        pipe.send((True, function(rank, world, *args)))
        dist.barrier()
        dist.destroy_process_group()
    except Exception:
        pipe.send((False, traceback.format_exc()))
