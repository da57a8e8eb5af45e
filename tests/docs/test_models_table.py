"""docs/diffusers.md: its tables of transformer classes say what the code has."""

from __future__ import annotations

import re

from dbsp_diffusers.models import ARCHITECTURES, UNSUPPORTED
from tests.support.repository import ROOT

PAGE = (ROOT / "docs" / "diffusers.md").read_text(encoding="utf-8")


def rows(header: str) -> list[list[str]]:
    """The cells of a table of the page, by the first line that it begins with."""
    _, _, rest = PAGE.partition(header + "\n")
    table = rest.partition("\n\n")[0].splitlines()[1:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table]


def test_each_known_class_has_a_row():
    table = rows("| class in diffusers | pipelines | |")
    named = [name for cells in table for name in re.findall(r"`(\w+)`", cells[0])]
    assert sorted(named) == sorted(ARCHITECTURES)
    assert all(pipelines for _, pipelines, _ in table)


def test_rejected_classes_have_their_reasons():
    table = rows("| class in diffusers | why |")
    assert {name.strip("`"): why for name, why in table}.items() <= UNSUPPORTED.items()
    videos = {name for name in UNSUPPORTED if name.endswith("3DModel") and "image" not in UNSUPPORTED[name]}
    assert videos <= {name.strip("`") for name, _ in table}
