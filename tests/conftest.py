"""Fixtures shared by all tests."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator

import pytest

from tests.support import interpreter  # noqa: F401  before anything else imports triton
from tests.support.repository import python_path
from tests.support.thread_ranks import ThreadRanks
from tests.support.workers import WorkerPool

os.environ["PYTHONPATH"] = python_path()  # of every process that a test starts
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # each of them would compile every module


@pytest.fixture(scope="module")
def pools() -> Iterator[dict[int, WorkerPool]]:
    """By world size, the worker processes that run for a file: threads of groups that wait poll, and slow the rest."""
    running: dict[int, WorkerPool] = {}
    yield running
    for workers in running.values():
        workers.close()


@pytest.fixture
def pool(pools: dict[int, WorkerPool]) -> Callable[[int], WorkerPool]:
    """pool(world) gives the worker processes of that world size, started at first use and kept while they are fit."""
    for world in [world for world, workers in pools.items() if workers.crowded]:
        pools.pop(world).close()

    def get(world: int) -> WorkerPool:
        if world not in pools:
            pools[world] = WorkerPool(world)
        return pools[world]

    return get


@pytest.fixture
def threads() -> Callable[[int], ThreadRanks]:
    """threads(world) gives that many ranks that are threads: for what is no matter of processes or of transport."""
    return ThreadRanks


@pytest.fixture
def dbsp(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[object, str, str]]:
    """dbsp(*args) runs the command. Returns exit code, standard output, standard error."""

    def run(*args: object) -> tuple[object, str, str]:
        monkeypatch.setattr(sys, "argv", ["dbsp", *map(str, args)])
        capsys.readouterr()
        from dbsp_cli.cli import main  # not before `interpreter`

        with pytest.raises(SystemExit) as stopped:
            main()
        return stopped.value.code, *capsys.readouterr()

    return run
