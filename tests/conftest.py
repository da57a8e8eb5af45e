"""Fixtures shared by all tests."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest
import torch

from workers import WorkerPool

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is imported, so before any test imports it


@pytest.fixture(scope="session")
def pool() -> Iterator[Callable[[int], WorkerPool]]:
    """pool(world) gives the worker processes of that world size, started at first use and kept."""
    pools: dict[int, WorkerPool] = {}

    def get(world: int) -> WorkerPool:
        if world not in pools:
            pools[world] = WorkerPool(world)
        return pools[world]

    yield get
    for started in pools.values():
        started.close()
