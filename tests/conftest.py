"""Fixtures shared by all tests."""

from __future__ import annotations

import sys
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


@pytest.fixture
def dbsp(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[object, str, str]]:
    """dbsp(*args) runs the command. returns: exit code, standard output, standard error."""

    def run(*args: object) -> tuple[object, str, str]:
        monkeypatch.setattr(sys, "argv", ["dbsp", *map(str, args)])
        capsys.readouterr()
        from dbsp_core.cli import main  # not before `interpreter`

        with pytest.raises(SystemExit) as stopped:
            main()
        return stopped.value.code, *capsys.readouterr()

    return run
