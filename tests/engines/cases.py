"""What holds in every engine: its own Wan with db-SP equals one process of it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from scripts.checks.engines.runs import Case, run

KNOWN = "synthetic:density=0.4,block_q=16,block_k=8"
OTHER = "synthetic:density=0.4,block_q=16,block_k=8,seed=7"
PREDICTED = "sparge:cdf=0.6,block_q=16,block_k=8"
EVEN, UNEQUAL = (3, 4, 6), (3, 5, 5)
SPLITS = ((2, 1), (1, 2), (2, 2))
"""Ulysses × ring."""


def assert_equal_to_one_process(engine: str, ulysses: int, ring: int) -> list[dict[str, Any]]:
    """3 and 5 heads, 72 and 75 tokens alternately, known and predicted masks, guidance, Wan2.2's two transformers."""
    cases = (
        Case(3, (EVEN, UNEQUAL, EVEN), KNOWN),
        Case(5, (UNEQUAL,), PREDICTED, passes=2),
        Case(3, (UNEQUAL, EVEN), PREDICTED, pair=True, passes=2),
    )
    found = run(engine, ulysses, ring, *cases)
    assert_exact(cases, found)
    return found


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


def assert_another_mask_is_seen(engine: str) -> None:
    (found,) = run(engine, 2, 1, Case(3, (UNEQUAL,), KNOWN, wrong=OTHER))
    assert found["error"] > 1e-2
