"""The suite behind scripts/gpu_suite: asks worker processes for one case after another, and reports what they found.

Workers start once. Cases that are timed run alone, others on all workers at a time. A case that ends its process, or
is cut off, costs that process alone. All results are in one file, which a later call with the same folder reads: it
runs what is left, then what was right under other sources.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import queue
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.checks.gpu.results import LOGS, RESULTS, Key, Outcome, Results, Row

REPO = Path(__file__).resolve().parents[3]
LANES = 8
GRACE_S = 5.0  # seconds beyond its limit after which a worker that has not ended itself is ended
MOST_LINES, COLUMNS = 100, 118
MOST_LOG_BYTES = 8 << 20


@dataclass(frozen=True)
class Part:
    """Cases of one module's function of a setting, of the module `name` if `cases` is not given."""

    name: str
    what: str
    cases: str = ""

    @property
    def function(self) -> str:
        return self.cases or f"scripts.checks.gpu.{self.name}:cases"


PARTS = (
    Part("compilation", "machine code of three loops at three shapes, and seconds with a cold cache"),
    Part("kernels", "kernels at the main shapes, against their twins in float64 or bit for bit"),
    Part("rates", "rates at Wan2.1-14B's size, next to dense kernels; other sizes; dense heads"),
    Part("steady", "a steady call, on the device and on the host, kernel by kernel"),
    Part("ranks", "ranks as threads on one GPU, forward and backward, and where they wait"),
    Part("balance", "each rank of a plan alone, contiguous against dbsp", "scripts.checks.gpu.steady:balance_cases"),
    Part("constants", "dbsp bench: what the latency model knows of this GPU"),
    Part("safety", "compute-sanitizer, a captured CUDA graph, peak memory"),
    Part("sources", "every mask source on one rank"),
    Part("nccl", "processes on GPUs of their own, where there are two or more"),
    Part("shapes", "kernels at the other shapes with heads of 64 and more", "scripts.checks.gpu.kernels:other_cases"),
)
"""The most valuable first."""


def main() -> int:
    args = parsed_arguments()
    if args.publish is not None:
        from scripts.checks.gpu.publish import publish

        return publish(args.publish)
    args.out.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + 60 * args.minutes
    parts = [part for part in PARTS if part.name in args.parts]
    options = ["--dry-run"] * args.dry_run + ["--simulate"] * args.simulate
    lanes = 1 if args.dry_run else LANES
    with contextlib.ExitStack() as stack:
        workers = [
            stack.enter_context(Worker(parts, [*options, "--lanes", str(lanes)], args.out / LOGS))
            for _ in range(lanes)
        ]
        listed = workers[0].listed(deadline)
        if listed is None:
            print(f"a worker could not start; see {args.out / LOGS}", file=sys.stderr)
            return 1
        machine, cases = listed
        if not args.dry_run and not machine["multiprocessors"]:
            print("scripts/gpu_suite needs a CUDA device; try it with --dry-run", file=sys.stderr)
            return 2
        results = Results(args.out, machine)
        run_cases(cases, workers, results, deadline)
    shorten(args.out / LOGS)
    return report(results, [key for key, _ in cases])


def parsed_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/gpu_suite",
        description="Checks and measures db-SP on the GPUs at hand. Call it again to go on where it was cut off.",
        epilog="Parts: " + "; ".join(f"{part.name}: {part.what}" for part in PARTS),
    )
    parser.add_argument("--out", type=Path, default=REPO / "out" / "gpu", help="folder of results.json and logs.txt")
    parser.add_argument("--minutes", type=float, default=9, help="everything ends after so long")
    parser.add_argument("--parts", default=",".join(part.name for part in PARTS), help="names with a comma between")
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes on the CPU: times mean nothing")
    parser.add_argument("--simulate", action="store_true", help="the same on simulated GPUs (tests/gpu_node)")
    parser.add_argument("--publish", type=Path, metavar="FOLDER", help="write its results to constants and pages")
    args = parser.parse_args()
    args.dry_run |= args.simulate
    args.parts = [name.strip() for name in args.parts.split(",") if name.strip()]
    unknown = [name for name in args.parts if name not in [part.name for part in PARTS]]
    if unknown:
        parser.error(f"unknown parts: {', '.join(unknown)}; there are {', '.join(part.name for part in PARTS)}")
    return args


class Worker:
    """A process that runs cases, and the next one where a case has taken it along."""

    def __init__(self, parts: Sequence[Part], options: list[str], log: Path) -> None:
        self.command = [sys.executable, "-m", "scripts.checks.gpu.worker", *options, "--parts"]
        self.command += [f"{part.name}={part.function}" for part in parts]
        self.log = log
        self.start()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def start(self) -> None:
        """Starts a process, and a thread that takes its answers."""
        pipe = subprocess.PIPE
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(
                self.command, cwd=REPO, stdin=pipe, stdout=pipe, stderr=log, start_new_session=True
            )
        self.answers: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self.is_ready = False
        threading.Thread(target=self._take, args=(self.process, self.answers), daemon=True).start()

    @staticmethod
    def _take(process: subprocess.Popen[bytes], answers: queue.SimpleQueue[dict[str, Any] | None]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            answers.put(json.loads(line))
        answers.put(None)

    def end(self) -> None:
        """Ends the process, and ranks that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def answer(self, until: float) -> dict[str, Any] | None:
        """Returns the next answer, or None once the process has ended. Raises queue.Empty if its time is over."""
        return self.answers.get(timeout=max(0.0, until - time.monotonic()))

    def listed(self, deadline: float) -> tuple[dict[str, Any], list[tuple[Key, bool]]] | None:
        """Returns the machine, and each case with whether it runs alone; None if the process did not come up."""
        try:
            first = self.answer(deadline)
        except queue.Empty:
            return None
        self.is_ready = first is not None
        return first and (first["machine"], [(Key(part, name), alone) for part, name, alone in first["cases"]])

    def run(self, key: Key, sources: str, deadline: float) -> Outcome | None:
        """Runs a case. Returns None if the suite's time was over before the case was."""
        outcome = Outcome("failed", sources)
        until, begun, limit_s = deadline, time.monotonic(), float("inf")
        try:
            # 1. A process that is ready, another one if need be.
            if self.process.poll() is not None:
                self.end()
                self.start()
            if not self.is_ready and self.listed(deadline) is None:
                return died(outcome, "its process did not start") if time.monotonic() < deadline else None
            assert self.process.stdin is not None
            self.process.stdin.write(json.dumps(key).encode() + b"\n")
            self.process.stdin.flush()
            # 2. What it finds, until it says that it goes on.
            while (answer := self.answer(until)) is not None:
                if "begun" in answer:
                    begun, limit_s = time.monotonic(), answer["begun"]
                    until = min(deadline, begun + limit_s + GRACE_S)
                elif "row" in answer:
                    outcome.rows.append(Row(**answer["row"]))
                elif "state" in answer:
                    outcome = Outcome(answer["state"], sources, answer["seconds"], answer["error"], outcome.rows)
                else:
                    return outcome
        except queue.Empty:
            self.end()
            if time.monotonic() >= deadline:
                return None
        except BrokenPipeError:  # it ended before it was asked
            pass
        # 3. The process is gone.
        self.end()
        outcome.seconds = outcome.seconds or round(time.monotonic() - begun, 2)
        if outcome.seconds >= limit_s:
            outcome.state, outcome.error = "slow", f"cut off after {limit_s:g} s"
        elif outcome.state == "failed" and not outcome.error:
            died(outcome, f"it ended its process with status {self.process.returncode}")
        return outcome


def died(outcome: Outcome, reason: str) -> Outcome:
    outcome.error = f"{reason}; see {LOGS}"
    return outcome


def run_cases(cases: Sequence[tuple[Key, bool]], workers: Sequence[Worker], results: Results, deadline: float) -> None:
    """Runs cases that have no outcome yet, in order, until the time is over."""
    left = [(key, alone) for key, alone in cases if not results.is_done(key)]
    left.sort(key=lambda case: results.is_older(case[0]))
    lock = threading.Lock()

    def serve(worker: Worker, waiting: queue.SimpleQueue[Key]) -> None:
        while time.monotonic() < deadline:
            try:
                key = waiting.get_nowait()
            except queue.Empty:
                return
            outcome = worker.run(key, results.sources, deadline)
            if outcome is not None:
                with lock:
                    results.record(key, outcome)
                    print(f"{key.part}: {key.case}: {outcome.state}, {outcome.seconds:g} s", file=sys.stderr)

    for alone, group in itertools.groupby(left, key=lambda case: case[1]):
        waiting: queue.SimpleQueue[Key] = queue.SimpleQueue()
        for key, _ in group:
            waiting.put(key)
        used = workers[:1] if alone else workers
        with ThreadPoolExecutor(len(used)) as threads:
            list(threads.map(serve, used, itertools.repeat(waiting)))


def shorten(log: Path) -> None:
    """Keeps the end of a log that has grown too long to be sent."""
    content = log.read_bytes()
    if len(content) > MOST_LOG_BYTES:
        log.write_bytes(content[-MOST_LOG_BYTES:])


def report(results: Results, keys: Sequence[Key]) -> int:
    """Prints what was measured, what was not right, goals and a verdict. Returns 1 if a case failed, else 0."""
    machine = results.machine
    outcomes = {key: results.outcomes[key] for key in keys if key in results.outcomes}
    # 1. What was measured, the first parts first.
    measured = []
    for key, outcome in outcomes.items():
        rows = [row for row in outcome.rows if row.limit is None and not row.goal]
        said = f"{key.part}: {key.case}: " + "; ".join(
            f"{row.what} {row.value:.4g} {row.unit}".rstrip() for row in rows
        )
        measured += textwrap.wrap(said, COLUMNS, subsequent_indent="    ") if rows else []
    # 2. What was not right, and goals.
    last, states = [], Counter[str]()
    for key, outcome in outcomes.items():
        states["failed" if not outcome.correct else outcome.state] += 1
        wrong = [row for row in outcome.rows if not row.correct]
        if outcome.state in ("failed", "slow"):
            last.append(f"  {key.part}: {key.case}: {outcome.state}, {outcome.error}"[:180])
        last += [f"  {key.part}: {key.case}: {row.what}: {row.value:.3g}, not ≤ {row.limit:.3g}" for row in wrong]
    goals = [
        f"  {key.case}: {row.what}: {row.value:.4g}, goal {row.goal}: {'yes' if row.met else 'NO'}"
        for key, outcome in outcomes.items()
        for row in outcome.rows
        if row.goal
    ]
    # 3. At most MOST_LINES of it all.
    goals, last = cut(goals, MOST_LINES // 3), cut(last, MOST_LINES // 3)
    print(f"{machine['devices'][0]}, {machine['commit']}, {machine['how']}")
    print("\n".join(["measured:", *cut(measured, MOST_LINES - 8 - len(goals) - len(last))]))
    print("\n".join(["not right:" if last else "nothing was wrong", *last, "goals:" if goals else "no goals", *goals]))
    unfinished = Counter(key.part for key in keys if not results.is_done(key))
    rest = ", ".join(f"{count} of {part}" for part, count in unfinished.items())
    verdict = ", ".join(f"{states[state]} {state}" for state in ("failed", "slow", "skipped"))
    again = f"; call it again for cases that are left: {rest}" if rest else ""
    print(f"gpu_suite: {states['ended']} of {len(keys)} cases right, {verdict}{again}")
    return int(states["failed"] > 0)


def cut(lines: list[str], most: int) -> list[str]:
    """Returns the first lines, and how many are left out."""
    left_out = len(lines) - most
    return lines if left_out <= 0 else [*lines[: most - 1], f"  … {left_out + 1} more lines in {RESULTS}"]


if __name__ == "__main__":
    sys.exit(main())
