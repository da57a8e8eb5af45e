"""Table of versions: what was tried, and what came of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

BOUND = 1e-5
MOST_SAID = 110
"""Characters of what went wrong."""


@dataclass(frozen=True)
class Row:
    """One version, and what came of it.

    names: private names that hold, of how many;  runs: tiny models that are exact, of how many
    worst: the largest error;  messages: of the others
    """

    package: str
    version: str
    which: str
    python: str = ""
    torch: str = ""
    names: str = ""
    runs: str = ""
    worst: str = ""
    messages: str = ""


def summed_up(row: Row, found: dict[str, Any]) -> Row:
    names, runs, versions = found["names"], found["runs"], found["versions"]
    messages = []
    if isinstance(names, str):
        messages.append(names)
        names = {}
    messages += _by_reason([one for package in names.values() for one in package["messages"]])
    errors = {name: error for name, error in runs.items() if isinstance(error, float)}
    messages += [f"{name}: {said[:MOST_SAID]}" for name, said in runs.items() if name not in errors]
    messages += [f"{name}: wrong by {error:.2g}" for name, error in errors.items() if not error <= BOUND]
    of = sum(one["of"] for one in names.values())
    held = of - sum(len(one["messages"]) for one in names.values())
    exact = sum(error <= BOUND for error in errors.values())
    return replace(
        row,
        python=versions["python"],
        torch=versions["torch"],
        names=f"{held} of {of}",
        runs=f"{exact} of {len(runs)}",
        worst=f"{max(errors.values(), default=0):.1e}",
        messages="; ".join(messages),
    )


def _by_reason(messages: Sequence[str]) -> list[str]:
    """Returns each reason of "NAME: REASON" once, with the first of its names and how many others have it."""
    names: dict[str, list[str]] = {}
    for one in messages:
        name, _, reason = one.partition(": ")
        names.setdefault(reason[:MOST_SAID] or one, []).append(name)
    return [
        reason if reason.startswith(first) else f"{first}{f' and {len(others)} others' if others else ''}: {reason}"
        for reason, (first, *others) in names.items()
    ]
