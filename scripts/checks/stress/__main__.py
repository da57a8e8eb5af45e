"""Stress tests, as scripts/campaign starts them."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import pkgutil
import secrets
import sys
import time
from typing import Any

from scripts.checks.stress.part import Part
from tests.support import interpreter  # noqa: F401  before anything else imports triton

PARTS = {
    "oracle": ("scripts.checks.stress.oracle:Oracle", 0.7),
    "faults": ("scripts.checks.stress.faults:Faults", 0.3),
}
"""Class of each, imported when it runs, which takes seconds; and its share of the time if all parts run."""


def _seed(text: str) -> int:
    return secrets.randbelow(10**9) if text == "new" else int(text)


def part_named(name: str) -> Part:
    return pkgutil.resolve_name(PARTS[name][0])()


def run_part(name: str, part: Part, seed: int, seconds: float) -> dict[str, Any]:
    """Runs cases of a part for so long, but at least one. Prints failures at once, and returns numbers."""
    failures: list[str] = []
    worst: dict[str, float] = {}
    start = time.monotonic()
    try:
        for number in itertools.count():
            case = part.draw(seed, number)
            outcome = part.outcome(case)
            for key, value in outcome.measure.items():
                worst[key] = max(value, worst.get(key, value))
            if outcome.failure is not None:
                failures.append(f"scripts/campaign --case {name}:{seed}:{number}   {outcome.failure}   {case}")
                print(failures[-1], file=sys.stderr, flush=True)
            elapsed = time.monotonic() - start
            if elapsed > seconds:
                break
    finally:
        part.close()
    return {"cases": number + 1, "failures": failures, "worst": worst, "seconds": round(elapsed, 1)}


def repeat(name: str, seed: int, number: int) -> int:
    """Runs one case again, and prints what it is. Returns the exit code."""
    part = part_named(name)
    case = part.draw(seed, number)
    try:
        outcome = part.outcome(case)
    finally:
        part.close()
    print(f"{outcome.failure or 'passed'} {dict(outcome.measure)}\n{case}")
    return int(outcome.failure is not None)


def main() -> int:
    """Returns the exit code, 1 if a case failed."""
    parser = argparse.ArgumentParser(prog="scripts/campaign", description="Tries to break db-SP: see tests/README.md")
    parser.add_argument("--minutes", type=float, default=3.0, help="for all parts together")
    parser.add_argument("--seed", type=_seed, default=0, help="of all cases, or new")
    parser.add_argument("--part", choices=[*PARTS, "all"], default="all")
    parser.add_argument("--case", metavar="PART:SEED:NUMBER", help="repeat one case, and say what it is")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    options = parser.parse_args()
    if options.case:
        name, seed, number = options.case.split(":")
        return repeat(name, int(seed), int(number))
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # libraries of workers log to standard output
    command = f"scripts/campaign --seed {options.seed} --part {options.part} --minutes {options.minutes:g}"
    print(command, file=sys.stderr, flush=True)
    parts = {}
    for name in PARTS if options.part == "all" else [options.part]:
        share = PARTS[name][1] if options.part == "all" else 1.0
        parts[name] = run_part(name, part_named(name), options.seed, options.minutes * 60 * share)
    if options.json:
        print(json.dumps({"seed": options.seed, "parts": parts}), file=out)
    else:
        for name, numbers in parts.items():
            failures = numbers["failures"]
            print(f"{name}: {numbers['cases']} cases, {len(failures)} failures, worst {numbers['worst']}", file=out)
            print("".join(f"{failure}\n" for failure in failures), end="", file=out)
        print(command, file=out)
    out.close()
    return int(any(numbers["failures"] for numbers in parts.values()))


if __name__ == "__main__":
    raise SystemExit(main())
