"""Errors that all ranks raise together: if one rank stopped, the others would wait for it."""

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
"""A complaint for `check_consistent`: ranks with debug compare more often, and would wait for the others."""


def run_consistently(
    group: SequenceGroup,
    function: Callable[[], Result],
    fingerprint: Callable[[Result], int] = lambda _: 0,
    what: str = "the result",
) -> Result:
    """Calls a function on every rank, and raises on all where it raises on some or its results differ. Collective.

    `fingerprint` maps a result to a number below 2^63, equal for equal results; `what` names it in the message.

    Raises:
        UserError: Where results differ, or the first rank that failed raised one.
        ValueError: Where the first rank that failed raised another error.
    """
    problem: Exception | None = None
    result, mark = None, 0
    try:
        result = function()
        mark = fingerprint(result)
    except Exception as error:  # any error: this rank must not stop alone
        problem = error
    complaint = f"{what} differs on rank(s) {{}}; it must be the same on every rank"
    check_consistent(group, problem, {complaint: mark})
    return result  # type: ignore[return-value]  # there is one, or check_consistent has raised


def check_consistent(
    group: SequenceGroup,
    problem: Exception | None,
    marks: Mapping[str, int],
    error: type[Exception] = UserError,
) -> None:
    """Raises on all ranks when any of them has a problem, or a mark that most ranks don't have. Collective.

    Args:
        group: The ranks.
        problem: This rank's, if any.
        marks: Numbers below 2^63, by the complaint about ranks whose number differs, with {} for the ranks.
        error: Raised where marks differ. A problem is raised as UserError where it is one, else as ValueError; if
            `error` is no UserError, every problem is raised as `error`.
    """
    with outside_transforms():
        states = [(_kind(problem), *marks.values())]
        if not group.alone:  # without a process group one rank of several may be examined
            states = [tuple(state) for state in group.gather_integers(states[0])]
        failed = [rank for rank, (kind, *_) in enumerate(states) if kind != _FINE]
        if failed:
            first = failed[0]
            texts = [_in_words(problem)] if group.alone else gather_texts(group, _in_words(problem))
            where = "" if len(failed) == len(states) else f"rank(s) {failed}: "
            raised: type[Exception] = UserError if states[first][0] == _USERS else ValueError
            if not issubclass(error, UserError):
                raised = error
            raise raised(where + texts[first]) from problem
        for complaint, of_ranks in zip(marks, list(zip(*states, strict=True))[1:], strict=True):
            require_equal(complaint, of_ranks, error)


def require_equal(complaint: str, of_ranks: Sequence[int], error: type[Exception] = UserError) -> None:
    """Raises an error about ranks whose number is not the most frequent one; `complaint` has {} for the ranks."""
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


def gather_texts(group: SequenceGroup, text: str) -> list[str]:
    """Every rank's text, by rank. Collective."""
    mine = text.encode()
    length = max(1, *(size for (size,) in group.gather_integers([len(mine)])))
    padded = torch.frombuffer(bytearray(mine.ljust(length)), dtype=torch.uint8)
    texts = group.for_host_tensors().all_gather(padded)
    return [bytes(one.tolist()).decode(errors="replace").rstrip() for one in texts]
