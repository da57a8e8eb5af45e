"""docs/code-map.md names every file of the packages, and no file that is not there."""

from __future__ import annotations

import re
from pathlib import Path

from tests.support.repository import ROOT

PAGE = (ROOT / "docs" / "code-map.md").read_text(encoding="utf-8")
PACKAGES = (
    "kernels/dbsp_kernels",
    "dbsp_core",
    "dbsp_diffusers",
    "dbsp_xdit",
    "dbsp_para",
    "dbsp_engines",
    "dbsp_cli",
)
BY_FOLDER = {"dbsp_cli/commands": "`dbsp_cli/commands/`"}
"""Folders whose files are named without their endings, one command each."""


def product_files() -> list[Path]:
    found = [path.relative_to(ROOT) for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    return [path for path in found if not path.name.startswith("__")]


def test_every_file_is_named():
    assert len(product_files()) > 120
    missing = []
    for path in product_files():
        folder = BY_FOLDER.get(path.parent.as_posix())
        named = re.search(rf"[`/]{re.escape(path.name)}`", PAGE) if folder is None else f"`{path.stem}`" in PAGE
        if not named:
            missing.append(path.as_posix())
    assert missing == []


def test_every_name_is_a_file():
    named = set(re.findall(r"[\w/]*?(\w+\.py)`", PAGE))
    assert named - {path.name for path in product_files()} - {"test_layering.py"} == set()
