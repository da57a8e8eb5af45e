"""What lies in a user's current folder is not imported in place of Python's own modules."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import dbsp_cli
import dbsp_core
from dbsp_cli.commands.doctor import Importable
from tests.support.repository import child_environment

PROGRAM = Path(dbsp_cli.__file__).with_name("__main__.py")
"""What torchrun runs in each rank."""
LOOKS = """
import sys

class Finder:
    def find_spec(self, name, *_):
        if name == "dbsp_cli.cli":
            print([path for path in sys.path if path.endswith("dbsp_cli")])

sys.meta_path.insert(0, Finder())
"""
"""Says, while the command is being imported, whether the folder of its program is searched."""
NAMES = ("random", "queue", "logging", "token", "runpy", "ctypes", "torch", "dbsp_cli", "dbsp_core")


@pytest.fixture
def folder(tmp_path):
    """A user's folder, with files that are called as modules are."""
    for name in NAMES:
        (tmp_path / f"{name}.py").write_text("raise SystemExit('the file of the user ran')\n", encoding="utf-8")
    return tmp_path


def run(folder, *path):
    return subprocess.run(
        [sys.executable, PROGRAM, "--version"],
        cwd=folder,
        env=child_environment(*path),
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_ranks_find_pythons_own_modules_and_search_no_folder_of_db_sp(folder, tmp_path_factory):
    """Or `import output` would find `dbsp_cli.output`."""
    looking = tmp_path_factory.mktemp("looking")
    (looking / "sitecustomize.py").write_text(LOOKS)
    done = run(folder, looking)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["[]", "db-SP " + dbsp_core.__version__]


def test_modules_of_the_current_folder_are_found_by_pythonpath_alone(folder):
    assert "the file of the user ran" in run(folder, folder).stderr


def test_doctor_tries_imports_without_them(folder, monkeypatch):
    monkeypatch.chdir(folder)
    check = Importable("queues", ("json",), "xdit", "import queue, random").check()
    assert check.ok, check.detail
