"""What lies in a user's current folder is not imported in place of Python's own modules."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from dbsp_cli.commands.doctor import Importable
from dbsp_start.module import module_command
from dbsp_start.parents import with_parent
from tests.support.repository import child_environment

NAMES = ("random", "queue", "logging", "token", "runpy", "ctypes", "torch", "dbsp_start")
SAYS = "import random, queue, sys\nprint('arguments', sys.argv[1:])\nprint('folders', sys.path)\n"


@pytest.fixture
def folder(tmp_path):
    """A user's folder, with files that are called as modules are, beside a folder with a rank program."""
    here, elsewhere = tmp_path / "here", tmp_path / "elsewhere"
    here.mkdir()
    elsewhere.mkdir()
    for name in NAMES:
        (here / f"{name}.py").write_text("raise SystemExit('the file of the user ran')\n", encoding="utf-8")
    (here / "own.py").write_text("print('own')\n", encoding="utf-8")
    (elsewhere / "rank_program.py").write_text(SAYS, encoding="utf-8")
    return here


def run(command, folder, *path):
    done = subprocess.run(
        [*map(str, command)], cwd=folder, env=child_environment(*path), capture_output=True, text=True, timeout=120
    )
    return done.returncode, done.stdout, done.stderr


def test_ranks_find_pythons_own_modules(folder):
    """The chain that `dbsp generate` starts: a parent's watch, torchrun, and a rank."""
    rank = module_command("dbsp_start.rank", "rank_program", "a", "--b=c")
    torchrun = [sys.executable, *module_command("torch.distributed.run", "--standalone", "--nproc-per-node=1", *rank)]
    code, out, err = run(with_parent(torchrun), folder, folder.parent / "elsewhere")
    assert code == 0, err
    assert "arguments ['a', '--b=c']" in out
    assert str(folder) not in out
    assert os.path.dirname(module_command("x")[0]) not in out, "nor does db-SP's own folder of starters come first"


def test_a_module_of_the_current_folder_is_found_by_pythonpath_alone(folder):
    for name in NAMES:
        (folder / f"{name}.py").unlink()
    assert run([sys.executable, *module_command("own")], folder)[0] != 0
    assert run([sys.executable, *module_command("own")], folder, ".") == (0, "own\n", "")


def test_doctor_tries_imports_without_them(folder, monkeypatch):
    monkeypatch.chdir(folder)
    check = Importable("queues", ("json",), "xdit", "import queue, random").check()
    assert check.ok, check.detail
