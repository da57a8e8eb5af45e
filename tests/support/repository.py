"""Paths of the repository: tests run from any folder."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def python_path(*first: object) -> str:
    """Returns a PYTHONPATH that finds db-SP, `tests` and `scripts` from any folder; `first` comes before all."""
    given = filter(None, [os.environ.get("PYTHONPATH")])
    return os.pathsep.join([*map(str, first), str(ROOT), str(ROOT / "kernels"), *given])


def child_environment(*first: object) -> dict[str, str]:
    """Returns the environment of a process that a test starts: this one's, and `python_path(*first)`."""
    return os.environ | {"PYTHONPATH": python_path(*first)}


def git(folder: Path, *arguments: str) -> str:
    """Returns what git prints there, in a repository in which nobody needs a name to commit."""
    command = ["git", "-c", "user.name=db-SP", "-c", "user.email=none@example.org", *arguments]
    return subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout.strip()
