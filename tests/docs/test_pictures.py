"""The pictures of the pages can be drawn again: each script of docs/pictures that `draw` runs."""

from __future__ import annotations

import re
import sys

import pytest
from matplotlib.image import imread

from tests.support.programs import run
from tests.support.repository import ROOT

FOLDER = ROOT / "docs" / "pictures"
(NAMES,) = re.findall(r"for each in (.+); do", (FOLDER / "draw").read_text(encoding="utf-8"))
QUICK = "strategies_picture"


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == QUICK else pytest.mark.long) for name in NAMES.split()]
)
def test_script_draws_its_pictures_in_the_size_of_those_that_are_shown(tmp_path, name):
    done = run([sys.executable, FOLDER / f"{name}.py", "--out", tmp_path])
    assert done.returncode == 0, done.stderr
    drawn = sorted(tmp_path.glob("*.png"))
    assert sorted(done.stdout.splitlines()) == [f"wrote {path}" for path in drawn]
    for path in drawn:
        shown = next(folder / path.name for folder in (FOLDER, FOLDER.parent) if (folder / path.name).is_file())
        assert imread(path).shape == imread(shown).shape, path.name
