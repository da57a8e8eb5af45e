"""What holds in every engine: its own Wan with db-SP equals one process of it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from dbsp_core.utils.expected_host import ExpectedHost
from scripts.checks.engines.commands import differences
from scripts.checks.engines.runs import Case, run

KNOWN = "synthetic:density=0.4,block_q=16,block_k=8"
OTHER = "synthetic:density=0.4,block_q=16,block_k=8,seed=7"
PREDICTED = "sparge:cdf=0.6,block_q=16,block_k=8"
EVEN, UNEQUAL = (3, 4, 6), (3, 5, 5)
SPLITS = ((2, 1), (1, 2), (2, 2))
"""Ulysses × ring."""


def assert_exact(cases: Iterable[Case], found: list[dict[str, Any]]) -> None:
    for case, one in zip(cases, found, strict=True):
        assert "rejected" not in one, (case, one)
        assert one["error"] <= 1e-5, (case, one)
        assert one["dense"] > 1e-2, f"the mask matters: {case, one}"


def own_masks(folder: Path) -> str:
    """A file of settings in which Wan2.2's two transformers have masks of their own."""
    file = folder / "own-masks.yaml"
    file.write_text(f"mask: {KNOWN}\ntransformer_2: {{mask: '{OTHER}'}}\n", encoding="utf-8")
    return str(file)


class EveryEngine:
    """Tests of an engine, which a class of its file inherits.

    Attributes:
        without: Environment in which the engine does not load db-SP.
    """

    engine: str
    expected: ExpectedHost
    without: dict[str, str]

    @pytest.mark.parametrize(("ulysses", "ring"), SPLITS)
    def test_it_equals_one_process(self, ulysses, ring):
        """Tries 3 and 5 heads, 72 and 75 tokens alternately, known and predicted masks, guidance, Wan2.2's two."""
        cases = (
            Case(3, (EVEN, UNEQUAL, EVEN), KNOWN),
            Case(5, (UNEQUAL,), PREDICTED, passes=2),
            Case(3, (UNEQUAL, EVEN), PREDICTED, pair=True, passes=2),
        )
        assert_exact(cases, run(self.engine, ulysses, ring, *cases))

    def test_wan22s_transformers_with_masks_of_their_own(self, tmp_path):
        case = Case(3, (UNEQUAL, EVEN), own_masks(tmp_path), pair=True)
        assert_exact([case], run(self.engine, 1, 2, case))

    def test_another_mask_would_be_seen(self):
        (found,) = run(self.engine, 2, 1, Case(3, (UNEQUAL,), KNOWN, wrong=OTHER))
        assert found["error"] > 1e-2

    def test_its_own_command_makes_the_video_of_one_process(self, tmp_path):
        found = differences(self.engine, tmp_path)
        assert found["ring"] < found["dense"] / 10

    def test_nothing_changes_where_db_sp_is_not_named(self):
        """Expects the same differences without the plug-in, bitwise."""
        case = Case(4, (EVEN, UNEQUAL), None)
        assert run(self.engine, 2, 1, case) == run(self.engine, 2, 1, case, **self.without)

    def test_the_names_that_it_uses_are_there(self):
        assert self.expected.problem() is None
