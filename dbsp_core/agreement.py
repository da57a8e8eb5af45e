"""Errors on all ranks together: a rank that stops alone leaves the others waiting for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from dbsp_core.groups import SequenceGroup

__all__ = ["agree", "gather_texts", "on_all_ranks"]

Result = TypeVar("Result")


def on_all_ranks(
    group: SequenceGroup,
    function: Callable[[], Result],
    device: torch.device,
    fingerprint: Callable[[Result], int] = lambda _: 0,
    what: str = "the result",
) -> Result:
    """function(), called by every rank; when it raises on some, or its results differ, all raise ValueError.

    Collective.
    fingerprint: below 2^63, equal for equal results
    """
    problem, result, mark = None, None, 0
    cause: Exception | None = None
    try:
        result = function()
        mark = fingerprint(result)
    except Exception as error:  # whatever it is: this rank must not stop alone
        cause = error
        problem = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
    try:
        agree(group, problem, mark, device, f"{what} differs on rank(s) {{}}; it must be the same on every rank")
    except ValueError as told:
        raise told from cause
    return result  # type: ignore[return-value]  # agree raised where there is none


def agree(
    group: SequenceGroup,
    problem: str | None,
    mark: int,
    device: torch.device,
    complaint: str,
    error: type[Exception] = ValueError,
) -> None:
    """Raises on all ranks when any of them has a problem, or a mark that most don't have. Collective.

    complaint: about marks that differ, with {} for the ranks
    error:     what is raised
    """
    states = group.gather_integers([int(problem is None), mark], device)
    failed = [rank for rank, (fine, _) in enumerate(states) if not fine]
    if failed:
        texts = gather_texts(group, problem or "", device)
        where = "" if len(failed) == group.size else f"rank(s) {failed}: "
        raise error(where + texts[failed[0]])
    marks = [mark for _, mark in states]
    usual = max(marks, key=marks.count)
    differing = [rank for rank, mark in enumerate(marks) if mark != usual]
    if differing:
        raise error(complaint.format(differing))


def gather_texts(group: SequenceGroup, text: str, device: torch.device) -> list[str]:
    """Every rank's text, by rank. Collective."""
    mine = text.encode()
    length = max(size for (size,) in group.gather_integers([len(mine)], device))
    padded = torch.frombuffer(bytearray(mine.ljust(length)), dtype=torch.uint8).to(device)
    return [bytes(one.tolist()).decode(errors="replace").rstrip() for one in group.all_gather(padded)]
