"""The wheel is all that one needs, built from what git has; `.ci/try_extras` installs it with each extra."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from email import message_from_string

import pytest

from tests.support.repository import ROOT, git
from tests.test_layering import PACKAGES

pytestmark = pytest.mark.long
MOST_BYTES = 1.2e6


def test_it_has_types_models_and_configurations_and_no_laboratory(tmp_path):
    # 1. Build from a copy of the files that git knows, or would add.
    for name in git(ROOT, "ls-files", "-z", "--cached", "--others", "--exclude-standard").split("\0"):
        source, target = ROOT / name, tmp_path / "source" / name
        if source.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(source.read_bytes())
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", tmp_path, tmp_path / "source"]
    subprocess.run(build, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    # 2. What it contains.
    assert wheel.stat().st_size < MOST_BYTES
    (stated,) = re.findall(r"wheel[^.]*?([\d.]+) MB", (ROOT / "CONTRIBUTING.md").read_text())
    assert abs(wheel.stat().st_size / 1e6 - float(stated)) < 0.2
    with zipfile.ZipFile(wheel) as content:
        names = set(content.namelist())
        metadata = content.read(next(name for name in names if name.endswith("/METADATA"))).decode()
    tops = {name.partition("/")[0] for name in names}
    assert tops == {*PACKAGES, next(top for top in tops if top.endswith(".dist-info"))}
    assert {f"{package}/py.typed" for package in PACKAGES} <= names
    for folder, pattern, target in (
        ("configs", "**/*.yaml", "dbsp_core/configs"),
        ("dbsp_core/reports/pages", "*", "dbsp_core/reports/pages"),
    ):
        found = [path.relative_to(ROOT / folder) for path in (ROOT / folder).glob(pattern) if path.is_file()]
        files = {f"{target}/{path.as_posix()}" for path in found}
        assert files <= names
        assert files
    said = message_from_string(metadata)
    (version,) = re.findall(r'__version__ = "(.+)"', (ROOT / "dbsp_core" / "__init__.py").read_text())
    assert said["Version"] == version
    assert {one.split(", ")[0] for one in said.get_all("Project-URL")} >= {"Homepage", "Documentation", "Changelog"}
