"""The suite behind scripts/gpu_suite: starts steps in processes of their own, and reports what they have found.

Kernels are compiled where they run, by several processes at a time that share one cache on disk; later calls find it
in the folder of earlier results. A cache filled elsewhere would not be found: Triton's key hashes its own sources and
libtriton.so (`triton.runtime.cache.triton_key`), which differs between releases and between versions of Python.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.checks.gpu.journal import REPO, Journal, Outcome
from scripts.checks.gpu.worker import FRESH, OUT_OF_TIME, TAIL

GRACE_S = 20.0
"""Seconds after its time that a process may still be at its last case."""
LEAST_S = 5.0
"""With less time left no step is begun."""


@dataclass(frozen=True)
class Step:
    """Checks or measurements of one module.

    Attributes:
        minutes: Time budget.
        lanes: Number of processes that share the cases, where nothing is timed.
        interpret: Whether a dry run needs Triton's interpreter.
        package: Package of the module, which has `cases(setting)`.
    """

    name: str
    minutes: float
    what: str
    lanes: int = 1
    interpret: bool = False
    package: str = "scripts.checks.gpu"


STEPS = {
    step.name: step
    for step in (
        Step("transformer", 2.5, "a tiny transformer with each mask source", lanes=4),
        Step("ranks", 3, "threads as ranks on one device, every UxRy, forward and backward", lanes=4),
        Step("waits", 1.5, "waits for the device in steady calls", lanes=2),
        Step("kernels", 4, "kernels at shipped shapes, against their twins", lanes=8, interpret=True),
        Step("rates", 5, "rates of kernels, next to dense SDPA and other libraries", interpret=True),
        Step("planning", 2, "times of prediction, tables and plans"),
        Step("nccl", 4, "processes on GPUs of their own"),
        Step("video", 3, "a denoising, balanced against unbalanced"),
    )
}


def main() -> int:
    args = parsed_arguments()
    deadline = time.monotonic() + 60 * args.minutes
    folders = tuple(dict.fromkeys(Path(folder).resolve() for folder in (args.out, args.earlier)))
    for folder in folders:
        folder.mkdir(parents=True, exist_ok=True)
    done = subprocess.run([sys.executable, "-m", "scripts.checks.gpu.machine"], cwd=REPO, stdout=subprocess.PIPE)
    machine = json.loads(done.stdout)
    if not args.dry_run and not machine["multiprocessors"]:
        print("scripts/gpu_suite needs a CUDA device; try it with --dry-run", file=sys.stderr)
        return 2
    kind = "simulated" if args.simulate else "dry run" if args.dry_run else machine["devices"][0]
    stamp = f"{machine['sources']} {kind}"
    for folder in folders:
        described = json.dumps({"dry_run": args.dry_run, **machine}, indent=1)
        (folder / "machine.json").write_text(described + "\n", encoding="utf-8")
    journals = {name: Journal(name, folders, stamp) for name in args.steps}
    for name in journals:
        earlier, here = (folder / f"{name}.jsonl" for folder in (folders[-1], folders[0]))
        if earlier.is_file() and not here.is_file():
            shutil.copyfile(earlier, here)
    for steps in groups(args, [STEPS[name] for name, journal in journals.items() if not journal.complete()]):
        if deadline - time.monotonic() > LEAST_S:
            run_steps({step: journals[step.name] for step in steps}, deadline, options_of(args, steps[0]))
    return report(machine, journals, args.dry_run)


def parsed_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/gpu_suite",
        description="Checks and measures db-SP on the GPUs at hand. Call it again to go on where it was cut off.",
        epilog="Steps: " + "; ".join(f"{step.name} ({step.minutes:g} min): {step.what}" for step in STEPS.values()),
    )
    default = REPO / "out" / "gpu"
    parser.add_argument("--out", default=os.environ.get("OUT", default), help="folder for results (default: $OUT)")
    parser.add_argument("--earlier", default=default, help="folder that keeps results from call to call")
    parser.add_argument("--minutes", type=float, default=25, help="no case is begun after so long")
    parser.add_argument("--steps", default=",".join(STEPS), help="names with a comma between")
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes on the CPU: times mean nothing")
    parser.add_argument("--simulate", action="store_true", help="the same on simulated GPUs (tests/gpu_node)")
    args = parser.parse_args()
    args.dry_run |= args.simulate
    args.steps = [name.strip() for name in args.steps.split(",") if name.strip()]
    unknown = [name for name in args.steps if name not in STEPS]
    if unknown:
        parser.error(f"unknown steps: {', '.join(unknown)}; there are {', '.join(STEPS)}")
    return args


def groups(args: argparse.Namespace, steps: list[Step]) -> list[list[Step]]:
    """Returns each step by itself, or in a dry run those that may share a process, whose start takes longest there."""
    if not args.dry_run:
        return [[step] for step in steps]
    found: dict[tuple[str, ...], list[Step]] = {}
    for step in steps:
        found.setdefault(tuple(options_of(args, step)), []).append(step)
    return list(found.values())


def options_of(args: argparse.Namespace, step: Step) -> list[str]:
    """Returns what a dry run's workers are started with."""
    interpreted = ["--simulate"] if args.simulate else ["--interpret"] * step.interpret
    return ["--dry-run", *interpreted] if args.dry_run else []


def run_steps(journals: dict[Step, Journal], deadline: float, options: list[str]) -> None:
    """Runs the processes of steps until no case is left or their time is over: several for a step, or one for all."""
    print("\n".join(f"{step.name}: {step.what}" for step in journals), file=sys.stderr, flush=True)
    until = min(deadline, time.monotonic() + sum(60 * step.minutes for step in journals))
    lanes = 1 if options else max(step.lanes for step in journals)
    running = [Lane(journals, until, [*options, "--lane", str(n), "--lanes", str(lanes)]) for n in range(lanes)]
    while any(lane.process is not None for lane in running):
        time.sleep(0.05)
        for lane in running:
            lane.follow()
    if all(lane.complete for lane in running):
        for journal in journals.values():
            journal.write("ended", "")


class Lane:
    """One process at a time that runs its share of steps' cases; another where a case took it along."""

    def __init__(self, journals: dict[Step, Journal], until: float, options: list[str]) -> None:
        self.journals, self.until, self.complete = list(journals.values()), until, False
        first = self.journals[0]
        self.folders, self.log = first.folders, first.folders[0] / f"{first.step}.log"
        modules = [f"{step.package}.{step.name}" for step in journals]
        self.command = [sys.executable, "-m", "scripts.checks.gpu.worker", *modules, "--stamp", first.stamp]
        self.command += [*options, "--folders", *map(str, self.folders)]
        self.process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        left = self.until - time.monotonic()
        if left < LEAST_S:
            return
        command = [*self.command, "--seconds", str(left)]
        cache = {"TRITON_CACHE_DIR": str(self.folders[-1] / "triton")}
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(
                command, cwd=REPO, stdout=log, stderr=log, env=cache | os.environ, start_new_session=True
            )

    def follow(self) -> None:
        """Looks after the process: ends it when it is late, and starts another after one that died."""
        if self.process is None:
            return
        status = self.process.poll()
        if status is None and time.monotonic() < self.until + GRACE_S:
            return
        if status not in (0, OUT_OF_TIME, FRESH):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)  # with the ranks that it started
            self.process.wait()
        died = status not in (None, 0, OUT_OF_TIME, FRESH)
        blamed = died and self.blame(self.process.pid, f"ended its process with status {status}")
        self.complete = status == 0
        self.process = None
        if blamed or status == FRESH:
            self.start()

    def blame(self, pid: int, message: str) -> bool:
        """Records a failure of the case that a process was at when it died. Returns False if it was at none.

        A case that was only late is left open: a later call begins it again.
        """
        log = self.log.read_text(encoding="utf-8", errors="replace")
        trace = re.sub(r"\nExtension modules: .*", "", log)[-TAIL:]  # a list that may be longer than the traceback
        error = {"type": "Died", "message": message, "traceback": trace}
        cases = [(journal, name, one) for journal in self.journals for name, one in journal.outcomes().items()]
        open_here = [(journal, name) for journal, name, one in cases if one.state == "open" and one.pid == pid]
        for journal, name in open_here or [(self.journals[0], "starting")]:
            journal.write("failed", name, error=error)
        return bool(open_here)


def report(machine: dict[str, Any], journals: dict[str, Journal], dry_run: bool) -> int:
    """Prints a table and a verdict. Returns 1 if a case failed, else 0."""
    print(f"\n{machine['devices'][0]}, {machine['commit']}" + ", a dry run: times mean nothing" * dry_run)
    states: Counter[str] = Counter()
    for name, journal in journals.items():
        print(f"\n{name}: {STEPS[name].what}")
        for case, outcome in journal.outcomes().items():
            if case:
                states["failed" if not outcome.correct else outcome.state] += 1
                print_case(case, outcome)
    failed, skipped = states["failed"], states["skipped"]
    unfinished = [name for name, journal in journals.items() if not journal.complete()]
    verdict = f"{states['ended']} of {states.total()} cases right, {failed} failed, {skipped} skipped"
    rest = f"; call it again for what is left of {', '.join(unfinished)}" if unfinished else ""
    print(f"\ngpu_suite: {verdict}{rest}")
    return int(failed > 0)


def print_case(case: str, outcome: Outcome) -> None:
    error, verdict = outcome.error, outcome.state
    if verdict == "ended":
        verdict = "right" if outcome.correct else "WRONG"
    print(f"  {case}: {verdict}" + (f", {error['type']}: {error['message'].partition(chr(10))[0]}" if error else ""))
    for row in outcome.rows:
        if row["limit"] is None or not row["correct"]:
            bound = row["goal"] or ("" if row["limit"] is None else f"≤ {row['limit']:.3g}")
            said = "" if row["met"] is None and row["correct"] else (" yes" if row["met"] else " NO")
            print(f"    {row['what']:<64} {row['value']:>10.4g} {row['unit']:<8} {bound}{said}")


if __name__ == "__main__":
    sys.exit(main())
