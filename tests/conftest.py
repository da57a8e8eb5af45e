"""Fixtures shared by all tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

import interpreter  # noqa: F401  before anything else imports triton
from workers import WorkerPool


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
