"""Breaks the product on purpose, one fault of seeded_faults.yaml a concept, and checks that a test turns red.

Works on a copy of the checkout in a temporary folder. Prints a table, and exits with 1 if a fault was missed:

    python -m scripts.checks.seeded_faults             # all, two at a time, in six minutes
    python -m scripts.checks.seeded_faults int8 merge  # those whose concept has one of these words
"""

from __future__ import annotations

import argparse
import itertools
import os
import queue
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import yaml

REPO = Path(__file__).resolve().parents[2]
LIMIT_S = 300  # most seconds of a selection
AT_ONCE = 2  # faults tried at a time, each in a copy of its own
FOUND, MISSED = 1, 0  # exit status of pytest: some tests failed; all passed
FAULTS = Path(__file__).with_suffix(".yaml")


class Fault(NamedTuple):
    file: str
    was: str
    becomes: str
    tests: str


def faults() -> dict[str, Fault]:
    """Returns faults by their concept."""
    entries = yaml.safe_load(FAULTS.read_text(encoding="utf-8"))
    return {concept: Fault(**fields) for concept, fields in entries.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description="Checks that tests find faults of the product.")
    parser.add_argument("words", nargs="*", help="only faults whose concept or file has one of these words")
    args = parser.parse_args()
    words = args.words or [""]
    chosen = {name: fault for name, fault in faults().items() if any(word in name + fault.file for word in words)}
    copies: queue.Queue[Path] = queue.Queue()

    def verdict_on(number: int, fault: Fault) -> tuple[str, float]:
        start, copy = time.monotonic(), copies.get()
        try:
            return tried(fault, copy, number), time.monotonic() - start
        finally:
            copies.put(copy)

    missed = 0
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(AT_ONCE) as threads:
        for number in range(AT_ONCE):
            copies.put(copied(Path(folder) / str(number)))
        for concept, (verdict, seconds) in zip(
            chosen, threads.map(verdict_on, itertools.count(1), chosen.values()), strict=True
        ):
            missed += verdict != "caught"
            print(f"{verdict:<7} {seconds:5.0f} s  {concept}", flush=True)
    print(f"{len(chosen) - missed} of {len(chosen)} faults caught")
    return int(missed > 0)


def copied(to: Path) -> Path:
    """Copies the tracked files of this checkout, as they are now."""
    tracked = subprocess.run(["git", "ls-files"], cwd=REPO, capture_output=True, text=True, check=True).stdout
    for name in tracked.splitlines():
        if (REPO / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(REPO / name, to / name)
    return to


def tried(fault: Fault, copy: Path, number: int) -> str:
    """Runs a fault's tests in a copy that has it, and takes it back. Returns "caught" or what happened."""
    file = copy / fault.file
    sound = file.read_text(encoding="utf-8")
    write(file, sound.replace(fault.was, fault.becomes), 2 * number)
    paths = os.pathsep.join(map(str, (copy, copy / "kernels")))
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *shlex.split(fault.tests)]
    environment = os.environ | {"PYTHONPATH": paths}
    try:
        done = subprocess.run(command, cwd=copy, env=environment, stdout=subprocess.DEVNULL, timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        return "late"
    finally:
        write(file, sound, 2 * number + 1)
    return {FOUND: "caught", MISSED: "missed"}.get(done.returncode, f"pytest ended with {done.returncode}")


def write(file: Path, text: str, seconds: int) -> None:
    """Writes a source with a time of its own, as bytecode is known to be old by whole seconds and sizes."""
    file.write_text(text, encoding="utf-8")
    then = time.time() + 10 * seconds
    os.utime(file, (then, then))


if __name__ == "__main__":
    sys.exit(main())
