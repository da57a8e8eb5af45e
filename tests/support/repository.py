"""Where things are: tests run from any folder."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HELPERS = sorted({str(path.parent) for path in (ROOT / "tests").rglob("*.py") if not path.name.startswith("test_")})
"""Folders of modules that tests and their processes import by name."""


def python_path(*first: object) -> str:
    """PYTHONPATH of a process that needs the tests' helpers, with `first` before all."""
    return os.pathsep.join([*map(str, first), *HELPERS, os.environ.get("PYTHONPATH", "")])
