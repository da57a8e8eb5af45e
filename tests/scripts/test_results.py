"""Pictures of results: each is drawn from its CSV alone, in one style, and is on a page."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("diffusers")
pytest.importorskip("skimage")
pytest.importorskip("matplotlib")

from dbsp_core.utils.errors import UserError
from scripts.results.__main__ import results
from scripts.results.figures import grouped_bars, panels
from scripts.results.result import FOLDER, Result, Row
from tests.support.repository import ROOT
from tests.support.texts import PAGES

BY_MODELS = {"quality-frames"}
"""Pictures of videos, which have no CSV."""
KNOWN = results()


@pytest.mark.parametrize("name", KNOWN)
def test_a_picture_is_drawn_from_its_csv(name, tmp_path):
    assert KNOWN[name].redraw(FOLDER, tmp_path).read_bytes().startswith(b"\x89PNG")


def test_every_picture_can_be_drawn_again_and_is_on_a_page():
    pictures = {path.stem for path in FOLDER.glob("*.png")}
    assert pictures == {*KNOWN, *BY_MODELS}
    shown = {name for page in PAGES for name in re.findall(r"!\[[^\]]*\]\(([^)]+\.png)\)", page.read_text("utf-8"))}
    others = {path for folder in ("docs", "docs/pictures") for path in (ROOT / folder).glob("*.png")}
    missing = [path for path in (*others, *FOLDER.glob("*.png")) if not any(one.endswith(path.name) for one in shown)]
    assert missing == []


def test_rows_come_back_from_a_csv_as_they_were(tmp_path):
    def draw(rows):
        figure, axes = panels("How many?", "measured")
        grouped_bars(axes[0, 0], [row.name for row in rows], {"count": [row.count for row in rows]}, ["black"])
        return figure

    result = Result("counts", "Counts", draw)
    rows = [Row(name="a", count=3, share=0.25), Row(name="b, c", count=1, share="–")]
    with pytest.raises(UserError, match=r"counts\.csv does not exist; make it with the command"):
        result.redraw(tmp_path)
    result.publish(rows, tmp_path)
    assert result.read(tmp_path) == rows
    text = (tmp_path / "counts.csv").read_bytes()
    result.redraw(tmp_path)
    assert (tmp_path / "counts.csv").read_bytes() == text, "drawing leaves the numbers alone"
