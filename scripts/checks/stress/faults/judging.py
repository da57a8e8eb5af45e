"""Checks of a case that is over."""

from __future__ import annotations

import re
from dataclasses import dataclass

from scripts.checks.stress.faults.keeper import Ended
from scripts.checks.stress.faults.programs import DONE

TOLERANCE = 1e-5
CLEAR = (
    "communication between the ranks of the sequence broke off",
    "injected",
    "rank(s) [",
    "not all ranks came",
)
"""What the last line of a rank that lives on must say one of."""
NEVER = ("terminate called", "Fatal Python error", "Segmentation fault", "core dumped", "Aborted")
FIRST_HAND = ("raise", "out of memory", "out of CPU memory", "disk full", "read-only")
"""Acts that raise in their rank."""
ENDS = {"kill": (-9,), "terminate": (-15,), "interrupt": (-2, 130)}
"""Exit codes of a rank by what happens to it."""


@dataclass(frozen=True)
class Expected:
    """Required end of a case.

    how: "success", every rank is right; "failure", each rank ends with an error; "harmless", all but the odd rank
    end well, and one says what is lacking; "quiet", nothing is said; "elsewhere": its task says

    odd: the rank that it happens to;  act: what;  words: on every rank's last line, before any attention was done
    silent: whether nobody is left who could say what is lacking
    odd_limit_s: for the odd rank, where that is more than for the others
    """

    how: str
    odd: int = 0
    act: str = ""
    words: str = ""
    silent: bool = False
    odd_limit_s: float = 0.0


def message_about(ended: Ended, expected: Expected, limit_s: float) -> str | None:
    """Returns what is wrong, or None."""
    found = [*_of_processes(ended, expected, limit_s)]
    if not found:
        how = "success" if expected.act and not ended.fired else expected.how
        found = [*_HOW[how](ended, expected)]
    return found[0] if found else None


def _of_processes(ended: Ended, expected: Expected, limit_s: float) -> list[str]:
    if ended.trouble:
        return [ended.trouble]
    found = [f"process {number} hangs" for number, code in enumerate(ended.codes) if code is None]
    found += [
        f"{LATE}: process {number} ended after {seconds:.1f} s"
        for number, seconds in enumerate(ended.seconds)
        if ended.fired and seconds > (max(limit_s, expected.odd_limit_s) if number == expected.odd else limit_s)
    ]
    found += [f"an orphan: {orphan[:200]}" for orphan in ended.orphans]
    found += [f"left behind: {name}" for name in ended.left]
    found += [f"process {n}: {word}" for n, text in enumerate(ended.errors) for word in NEVER if word in text]
    return found + ([ended.message] if ended.message else [])


LATE = "late"


def _success(ended: Ended, expected: Expected) -> list[str]:
    found = [f"rank {rank} ends with {code}: {_last(ended, rank)}" for rank, code in enumerate(ended.codes) if code]
    errors = [None if result is None else float(result) for result in ended.results]
    wrong = (rank for rank, error in enumerate(errors) if error is None or not error <= TOLERANCE)
    return found or [f"rank {rank} is wrong by {errors[rank]}" for rank in wrong]


def _failure(ended: Ended, expected: Expected) -> list[str]:
    found = []
    for rank, code in enumerate(ended.codes):
        last, odd = _last(ended, rank), rank == expected.odd
        if code == 0:
            end = f"{ended.codes[expected.odd]}: {_last(ended, expected.odd)}"
            found.append(f"rank {rank} ends with 0, the odd one with {end}")
        elif odd and expected.act in ENDS:
            if code not in ENDS[expected.act]:
                found.append(f"rank {rank} ends with {code}")
        elif code != 1:
            found.append(f"rank {rank} ends with {code}: {last}")
        elif expected.words:
            if expected.words not in last or not _ERROR.match(last):
                found.append(f"rank {rank} says {last!r}")
            elif DONE in ended.outputs[rank]:
                found.append(f"rank {rank} says so only after an attention")
        elif odd and expected.act in FIRST_HAND and "injected" not in ended.errors[rank]:
            found.append(f"rank {rank} does not say what was raised in it: {last}")
        elif not any(words in last for words in CLEAR):
            found.append(f"rank {rank} says {last!r}")
    return found


def _harmless(ended: Ended, expected: Expected) -> list[str]:
    found = []
    for rank, code in enumerate(ended.codes):
        if rank == expected.odd and expected.act in ENDS:
            if code not in ENDS[expected.act]:
                found.append(f"rank {rank} ends with {code}")
        elif code != 0:
            found.append(f"rank {rank} ends with {code}: {_last(ended, rank)}")
    said = [line for text in ended.errors for line in text.splitlines() if line.startswith("dbsp: ")]
    return found or ([] if said or expected.silent else ["nobody says what is lacking"])


def _quiet(ended: Ended, expected: Expected) -> list[str]:
    return [f"rank {rank} ends with {code}: {_last(ended, rank)}" for rank, code in enumerate(ended.codes) if code]


_RANK = re.compile(r"^\[rank\d+\]: ")
_ERROR = re.compile(r"[\w.]*Error: ")
_HOW = {"elsewhere": lambda *_: [], "success": _success, "failure": _failure, "harmless": _harmless, "quiet": _quiet}


def _last(ended: Ended, rank: int) -> str:
    lines = [line for line in ended.errors[rank].splitlines() if line.strip()]
    return _RANK.sub("", lines[-1]) if lines else ""
