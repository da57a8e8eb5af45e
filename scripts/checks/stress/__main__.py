"""Stress tests, as scripts/campaign starts them."""

from __future__ import annotations

import argparse
import json
import os
import pkgutil
import secrets
import sys
from multiprocessing import forkserver
from pathlib import Path

from scripts.checks.stress.frame import Part, read_state, run_part
from tests.support import interpreter  # noqa: F401  before anything else imports triton

STRESS = "scripts.checks.stress"
PARTS = {
    "oracle": (f"{STRESS}.oracle.oracle_part:Oracle", 0.4),
    "faults": (f"{STRESS}.faults.faults_part:Faults", 0.2),
    "features": (f"{STRESS}.features_part:Features", 0.15),
    "engines": (f"{STRESS}.engines_part:Engines", 0.05),
    "fuzz": (f"{STRESS}.fuzz.fuzz_part:Fuzz", 0.1),
    "soak": (f"{STRESS}.soak.soak_part:Soak", 0.1),
}
"""Class of each, imported when it runs, which takes seconds; and its share of the time, where all parts run."""
REPO = Path(__file__).resolve().parents[3]


def _seed(text: str) -> int:
    return secrets.randbelow(10**9) if text == "new" else int(text)


def part_named(name: str) -> Part:
    part: Part = pkgutil.resolve_name(PARTS[name][0])()
    return part


def main() -> int:
    """Returns the exit code, 1 if a case failed."""
    parser = argparse.ArgumentParser(prog="scripts/campaign", description="Tries to break db-SP: see tests/README.md")
    parser.add_argument("--minutes", type=float, default=3.0, help="for all parts together")
    parser.add_argument("--seed", type=_seed, help="of all cases, or new; default: that of the state file, else 0")
    parser.add_argument("--part", choices=[*PARTS, "all"], default="all")
    parser.add_argument("--state", type=Path, default=REPO / "out" / "campaign.json", help="says how far it has come")
    parser.add_argument("--case", metavar="PART:SEED:NUMBER", help="repeat one case, and say what it is")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    options = parser.parse_args()
    if options.case:
        name, seed, number = options.case.split(":")
        part = part_named(name)
        outcome = part.repeat(int(seed), int(number))
        print(f"{outcome.failure or 'passed'} {dict(outcome.measure)}\n{part.explain(int(seed), int(number))}")
        return int(outcome.failure is not None)
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # xfuser logs to standard output
    state = read_state(options.state, options.seed)
    called = f"scripts/campaign --seed {state['seed']} --part {options.part} --minutes {options.minutes:g}"
    print(called, file=sys.stderr, flush=True)
    for name in PARTS if options.part == "all" else [options.part]:
        share = PARTS[name][1] if options.part == "all" else 1.0
        run_part(part_named(name), state, options.state, options.minutes * 60 * share)
        forkserver._forkserver._stop()  # type: ignore[attr-defined]  the next part's imports other modules
    if options.json:
        print(json.dumps(state), file=out)
    else:
        for name, one in state["parts"].items():
            print(f"{name}: {one['cases']} cases, {one['failures']} failures, worst {one['worst']}", file=out)
        print("\n".join([*state["failures"], called]), file=out)
    out.close()
    return int(bool(state["failures"]))


if __name__ == "__main__":
    raise SystemExit(main())
