"""Fixtures shared by all tests."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator

import pytest

from tests.gpu_node.node import GpuNode
from tests.gpu_node.runtime import why_unavailable
from tests.support import interpreter  # noqa: F401  before anything else imports triton
from tests.support.repository import ROOT, python_path
from tests.support.thread_ranks import ThreadRanks
from tests.support.workers import WorkerPool, WorkerPools

os.environ["PYTHONPATH"] = python_path()  # of every process that a test starts
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # each of them would compile every module


FOLDERS = ("cli", "simulated", "scripts", "docs", "xdit", "para", "diffusers", "kernels", "core")
"""Folders of tests in the order in which they begin: long tests first, so that no process is left with one alone."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="also run the tests marked long")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what is marked long unless it is asked for, and brings folders into the order of `FOLDERS`."""
    if not config.getoption("--long") and "long" not in config.getoption("markexpr"):
        left_out = [item for item in items if item.get_closest_marker("long")]
        items[:] = [item for item in items if not item.get_closest_marker("long")]
        config.hook.pytest_deselected(items=left_out)
    items.sort(key=lambda item: FOLDERS.index(folder) if (folder := folder_of(item)) in FOLDERS else len(FOLDERS))


def folder_of(item: pytest.Item) -> str:
    """Returns the folder of `tests` that a test is in."""
    return item.path.relative_to(ROOT / "tests").parts[0]


@pytest.fixture(scope="session")
def pools() -> Iterator[WorkerPools]:
    running = WorkerPools()
    yield running
    running.close()


@pytest.fixture
def pool(pools: WorkerPools, request: pytest.FixtureRequest) -> Callable[[int], WorkerPool]:
    """Makes pool(world) give the worker processes of that world size, which live as long as one folder's tests run."""
    return pools.for_folder(folder_of(request.node))


@pytest.fixture
def threads() -> Callable[[int], ThreadRanks]:
    """Makes threads(world) give ranks that are threads, where processes and transport do not matter."""
    return ThreadRanks


@pytest.fixture
def debug(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets ranks compare what they attend with before each attention."""
    monkeypatch.setenv("DBSP_DEBUG", "1")


@pytest.fixture(scope="session")
def gpu_node() -> Iterator[GpuNode]:
    """Starts the node whose run(world, function, *arguments) runs on ranks that each have a simulated GPU."""
    reason = why_unavailable()
    if reason is not None:
        pytest.skip(reason)
    node = GpuNode()
    yield node
    node.close()


@pytest.fixture
def dbsp(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[object, str, str]]:
    """Makes dbsp(*args) run the command, and return exit code, standard output, standard error."""

    def run(*args: object) -> tuple[object, str, str]:
        monkeypatch.setattr(sys, "argv", ["dbsp", *map(str, args)])
        capsys.readouterr()
        from dbsp_cli.cli import main  # not before `interpreter`

        with pytest.raises(SystemExit) as stopped:
            main()
        return stopped.value.code, *capsys.readouterr()

    return run


@pytest.fixture
def mistake(dbsp: Callable[..., tuple[object, str, str]]) -> Callable[..., str]:
    """Makes mistake(*args) run a command that must end with one line and exit code 2, and return the line."""

    def run(*args: object) -> str:
        code, out, err = dbsp(*args)
        assert (code, out, err.count("\n")) == (2, "", 1), err
        assert err.startswith("dbsp: error: ")
        assert err.endswith("\n")
        return err

    return run
