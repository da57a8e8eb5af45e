"""Files of docs/results are what their commands make today, where that does not depend on the machine."""

from __future__ import annotations

import json
from typing import Any

import pytest

from scripts.results.evidence import FOLDER, read_evidence
from tests.support.programs import output_of

pytestmark = pytest.mark.long

PNG = b"\x89PNG"
PLANS = "python -m scripts.bench.planner"
"""Counts next to what it times, in fields that end with `_ms`."""
EXACT = [one for one in read_evidence() if "measured" not in one.how or one.command.startswith(PLANS)]
"""What was counted, modelled, fitted or published: its command gives the same on any machine."""


@pytest.mark.parametrize("one", EXACT, ids=lambda one: one.files[0])
def test_what_is_published_is_what_the_command_makes_today(tmp_path, one):
    _, _, module, *options = one.command.split()
    if "--json" in options:
        made = json.loads(output_of(module, *options, timeout=3600))
        assert without_times(made) == without_times(json.loads((FOLDER / one.files[0]).read_text()))
        return
    output_of(module, *options, "--out", tmp_path, timeout=3600)
    for name in one.files:
        if name.endswith(".png"):
            assert (tmp_path / name).read_bytes().startswith(PNG)
        else:
            assert (tmp_path / name).read_text() == (FOLDER / name).read_text()


def without_times(found: Any) -> Any:
    """Returns what a program of scripts/bench has found, without milliseconds."""
    if isinstance(found, dict):
        return {name: without_times(value) for name, value in found.items() if not name.endswith("_ms")}
    return [without_times(value) for value in found] if isinstance(found, list) else found
