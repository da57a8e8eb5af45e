"""Classifier-free-guidance parallelism: the two branches of each step, each on half of the ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dbsp_core.comm.groups import SequenceGroup

__all__ = ["Branch", "branch_of_wan"]

Branch = Callable[[], int]
"""Which guidance pass of a step this rank's group is about to run, where each group runs one alone; else 0."""


def branch_of_wan(pipe: Any, guidance: SequenceGroup) -> Branch:
    """xfuser's Wan pipelines run the conditioned pass, then the other; in parallel, the other on the first group."""

    def branch() -> int:
        alone = guidance.size > 1 and getattr(pipe, "do_classifier_free_guidance", False)
        return guidance.size - 1 - guidance.rank if alone else 0

    return branch
