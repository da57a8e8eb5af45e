"""Errors on all ranks together: a rank that stops alone leaves the others waiting for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import torch

from dbsp_core.comm.groups import SequenceGroup
from dbsp_core.comm.transforms import outside_transforms
from dbsp_core.utils.errors import UserError

__all__ = ["DEBUG_DIFFERS", "check_consistent", "gather_texts", "require_equal", "run_consistently"]

Result = TypeVar("Result")

DEBUG_DIFFERS = "debug differs on rank(s) {}; set it on all ranks or on none"
"""A complaint for `check_consistent`: ranks with debug compare more often, and the others would not come."""


def run_consistently(
    group: SequenceGroup,
    function: Callable[[], Result],
    device: torch.device,
    fingerprint: Callable[[Result], int] = lambda _: 0,
    what: str = "the result",
) -> Result:
    """function(), called by every rank; when it raises on some, or its results differ, all ranks raise. Collective.

    What is raised is a `UserError` where the first rank that failed had one, or results differ; else a ValueError.
    fingerprint: below 2^63, equal for equal results
    """
    problem: Exception | None = None
    result, mark = None, 0
    try:
        result = function()
        mark = fingerprint(result)
    except Exception as error:  # any error: this rank must not stop alone
        problem = error
    complaint = f"{what} differs on rank(s) {{}}; it must be the same on every rank"
    check_consistent(group, problem, {complaint: mark}, device)
    return result  # type: ignore[return-value]  # agree raised where there is none


def check_consistent(
    group: SequenceGroup,
    problem: Exception | None,
    marks: Mapping[str, int],
    device: torch.device,
    error: type[Exception] = UserError,
) -> None:
    """Raises on all ranks when any of them has a problem, or a mark that most don't have. Collective.

    marks: below 2^63, by the complaint about ranks whose mark differs, with {} for the ranks
    error: what is raised where marks differ. A problem is raised as a `UserError` where it is one, else as ValueError,
           or as `error` where that is no UserError
    """
    with outside_transforms():
        _check_consistent(group, problem, marks, device, error)


def _check_consistent(
    group: SequenceGroup,
    problem: Exception | None,
    marks: Mapping[str, int],
    device: torch.device,
    error: type[Exception],
) -> None:
    states = [(_kind(problem), *marks.values())]
    if not group.alone:  # without, this rank decides for all: a plan's part may be looked at alone
        states = [tuple(state) for state in group.gather_integers(states[0], device)]
    failed = [rank for rank, (kind, *_) in enumerate(states) if kind != _FINE]
    if failed:
        first = failed[0]
        texts = [_in_words(problem)] if group.alone else gather_texts(group, _in_words(problem), device)
        where = "" if len(failed) == len(states) else f"rank(s) {failed}: "
        raised: type[Exception] = UserError if states[first][0] == _USERS else ValueError
        if not issubclass(error, UserError):
            raised = error
        raise raised(where + texts[first]) from problem
    for complaint, of_ranks in zip(marks, list(zip(*states, strict=True))[1:], strict=True):
        require_equal(complaint, of_ranks, error)


def require_equal(complaint: str, of_ranks: Sequence[int], error: type[Exception] = UserError) -> None:
    """Raises an error about ranks whose number is not the one that most have. complaint: with {} for the ranks"""
    usual = max(of_ranks, key=of_ranks.count)
    differing = [rank for rank, mark in enumerate(of_ranks) if mark != usual]
    if differing:
        raise error(complaint.format(differing))


_FINE, _USERS, _OURS = range(3)


def _kind(problem: Exception | None) -> int:
    if problem is None:
        return _FINE
    return _USERS if isinstance(problem, UserError) else _OURS


def _in_words(problem: Exception | None) -> str:
    if problem is None:
        return ""
    plain = isinstance(problem, (ValueError, RuntimeError))
    return str(problem) if plain else f"{type(problem).__name__}: {problem}"


def gather_texts(group: SequenceGroup, text: str, device: torch.device) -> list[str]:
    """Every rank's text, by rank. Collective."""
    mine = text.encode()
    length = max(1, *(size for (size,) in group.gather_integers([len(mine)], device)))
    padded = torch.frombuffer(bytearray(mine.ljust(length)), dtype=torch.uint8).to(device)
    return [bytes(one.tolist()).decode(errors="replace").rstrip() for one in group.all_gather(padded)]
