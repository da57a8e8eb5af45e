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
LATE = "late"
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
    how = "success" if expected.act and not ended.fired else expected.how
    found = _of_processes(ended, expected, limit_s)
    if not found and how != "elsewhere":
        found = [one for rank in range(len(ended.codes)) if (one := _of_rank(rank, ended, expected, how))]
        said = any(line.startswith("dbsp: ") for text in ended.errors for line in text.splitlines())
        if how == "harmless" and not said and not expected.silent:
            found.append("nobody says what is lacking")
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


def _of_rank(rank: int, ended: Ended, expected: Expected, how: str) -> str | None:
    code, last, odd = ended.codes[rank], _last(ended, rank), rank == expected.odd
    ends = f"rank {rank} ends with {code}: {last}"
    if odd and expected.act in ENDS and how in ("failure", "harmless"):
        return None if code in ENDS[expected.act] else ends
    if how != "failure":
        result = ended.results[rank]
        wrong = how == "success" and (result is None or not float(result) <= TOLERANCE)
        return ends if code else f"rank {rank} is wrong by {result}" if wrong else None
    if code == 0:
        return f"rank {rank} ends with 0, the odd one with {ended.codes[expected.odd]}: {_last(ended, expected.odd)}"
    if code != 1:
        return ends
    if expected.words and DONE in ended.outputs[rank]:
        return f"rank {rank} says {last!r} only after an attention"
    if odd and expected.act in FIRST_HAND and "injected" not in ended.errors[rank]:
        return f"rank {rank} does not say what was raised in it: {last}"
    clear = expected.words in last and _ERROR.match(last) if expected.words else any(word in last for word in CLEAR)
    return None if clear else f"rank {rank} says {last!r}"


_RANK = re.compile(r"^\[rank\d+\]: ")
_ERROR = re.compile(r"[\w.]*Error: ")


def _last(ended: Ended, rank: int) -> str:
    lines = [line for line in ended.errors[rank].splitlines() if line.strip()]
    return _RANK.sub("", lines[-1]) if lines else ""
