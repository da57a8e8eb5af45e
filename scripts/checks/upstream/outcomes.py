"""What two runs of a suite came to: by test, and by what its models returned."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from dataclasses import dataclass
from pathlib import Path

import torch

__all__ = ["Comparison", "compare_outputs", "outcomes_of", "relative_difference"]


@dataclass(frozen=True)
class Comparison:
    """compared: outputs of both runs;  worst: the largest relative difference of those in float32 or float64
    worst_half: of those in 16 bits
    """

    compared: int = 0
    worst: float = 0.0
    worst_half: float = 0.0


def outcomes_of(report: Path) -> dict[str, tuple[str, str]]:
    """By test of pytest's JUnit XML: "passed", "skipped" or "failed", and why."""
    found = {}
    for case in ET.parse(report).iter("testcase"):
        problem = next((part for part in case if part.tag in ("skipped", "failure", "error")), None)
        outcome = "passed" if problem is None else "skipped" if problem.tag == "skipped" else "failed"
        why = "" if problem is None else " ".join(problem.get("message", "").split())[:160]
        name = f"{case.get('classname')}::{case.get('name')}"
        if found.get(name, ("passed",))[0] == "passed":  # an error in its end counts
            found[name] = outcome, why
    return found


def compare_outputs(stock: Path, dbsp: Path) -> Comparison:
    """Of what models returned in two runs, test by test and call by call."""
    if not (stock.exists() and dbsp.exists()):
        return Comparison()
    first, second = torch.load(stock, weights_only=True), torch.load(dbsp, weights_only=True)
    pairs = [
        (left, right)
        for test, outputs in first.items()
        for left, right in zip(outputs, second.get(test, ()), strict=False)
    ]
    full, half = (
        [relative_difference(left, right) for left, right in pairs if (left.element_size() < 4) == short]
        for short in (False, True)
    )
    return Comparison(len(pairs), max(full, default=0.0), max(half, default=0.0))


def relative_difference(left: torch.Tensor, right: torch.Tensor) -> float:
    """Of the largest value; infinite for other shapes, and where only one is not a number."""
    left, right = left.double(), right.double()
    if left.shape != right.shape or not torch.equal(left.isnan(), right.isnan()):
        return float("inf")
    left, right = left.nan_to_num(), right.nan_to_num()
    return float((left - right).abs().max() / left.abs().max().clamp_min(1e-30)) if left.numel() else 0.0
