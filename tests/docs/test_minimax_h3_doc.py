"""The seconds of docs/minimax-h3.md are those of its file; the engine's tests run its commands."""

from __future__ import annotations

import re

from tests.docs.results import rows
from tests.support.repository import ROOT

TABLE = re.compile(r"^\| (dense|VSA, sparsity [\d.]+) \| ([^|]+) \| [^|]+ \| ([\d.]+) \|$", re.MULTILINE)


def test_its_table_is_of_its_file():
    found = TABLE.findall((ROOT / "docs" / "minimax-h3.md").read_text(encoding="utf-8"))
    kept = rows("h3", machine="h100")
    assert len(found) == len(kept)
    for attention, way, milliseconds in found:
        (row,) = [row for row in kept if (row["attention"], row["way"]) == (attention, way.strip())]
        digits = len(milliseconds.partition(".")[2])
        assert float(milliseconds) == round(float(row["attention_ms"]), digits), row
