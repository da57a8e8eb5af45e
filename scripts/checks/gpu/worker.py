"""Runs the cases of steps in this process, for scripts.checks.gpu.suite: python -m scripts.checks.gpu.worker.

Exit status: 0 if no case is left, OUT_OF_TIME, or FRESH if the device failed and a new process must go on.
"""

from __future__ import annotations

import argparse
import ctypes
import faulthandler
import importlib
import os
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from scripts.checks.gpu.journal import MOST_STARTS, Case, Journal, Skipped

if TYPE_CHECKING:
    from scripts.checks.gpu.setting import Setting

OUT_OF_TIME, FRESH = 5, 6
PR_SET_PDEATHSIG = 1
TAIL = 3000
"""Characters of a traceback that are kept."""


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("modules", nargs="+", help="of steps, each with cases(setting)")
    parser.add_argument("--folders", nargs="+", type=Path, required=True)
    parser.add_argument("--stamp", required=True)
    parser.add_argument("--seconds", type=float, required=True, help="no case is begun after so long")
    parser.add_argument("--lane", type=int, default=0, help="of the cases, every LANES-th from this one on")
    parser.add_argument("--lanes", type=int, default=1)
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--simulate", action="store_true", help="on tests/gpu_node's simulated GPUs")
    parser.add_argument("--interpret", action="store_true", help="run Triton kernels in its interpreter")
    args = parser.parse_args()
    deadline = time.monotonic() + args.seconds
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # no worker outlives the suite
    faulthandler.enable()
    if args.interpret or args.simulate:
        os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported
    if args.simulate:
        importlib.import_module("tests.gpu_node.node").start_devices()  # before torch is imported
    if args.interpret:
        importlib.import_module("tests.support.interpreter")  # makes it faster
    import torch

    from scripts.checks.gpu.setting import Setting

    # tiny sizes gain nothing from threads, which take the processor from each other
    torch.set_num_threads(1 if args.dry_run else max(1, (os.cpu_count() or 1) // args.lanes))
    setting = Setting.tiny("cuda" if args.simulate else "cpu") if args.dry_run else Setting()
    for name in args.modules:
        torch.manual_seed(0)
        module = importlib.import_module(name)
        torch.use_deterministic_algorithms(getattr(module, "POISON", False), warn_only=True)
        journal = Journal(name.rpartition(".")[2], tuple(args.folders), args.stamp)
        cases = list(module.cases(setting))[args.lane :: args.lanes]
        if status := run_cases(cases, journal, setting, deadline):
            return status
    return 0


def run_cases(cases: Sequence[Case], journal: Journal, setting: Setting, deadline: float) -> int:
    """Runs the cases that are not over yet. Returns this process's exit status, 0 if it may go on."""
    known = journal.outcomes()
    for case in cases:
        before = known.get(case.name)
        if before is not None and (before.state != "open"):
            continue
        if before is not None and before.starts >= MOST_STARTS:
            message = f"begun {before.starts} times without an end: it hangs, or what started it was stopped"
            journal.write("failed", case.name, error={"type": "CutOff", "message": message, "traceback": ""})
            continue
        if time.monotonic() >= deadline:
            return OUT_OF_TIME
        run_case(case, journal)
        if not setting.device_works():
            return FRESH
    return 0


def run_case(case: Case, journal: Journal) -> None:
    """Runs a case, and writes what it finds as it finds it, its exception included."""
    print(f"{journal.step}: {case.name}", file=sys.stderr, flush=True)
    faulthandler.dump_traceback_later(case.limit_s, exit=True)
    journal.write("begun", case.name)
    start = time.monotonic()
    try:
        for row in case.run():
            journal.row(case.name, row)
    except Skipped as reason:
        journal.write("skipped", case.name, error={"type": "Skipped", "message": str(reason), "traceback": ""})
    except Exception as error:
        found = {"type": type(error).__name__, "message": str(error), "traceback": traceback.format_exc()[-TAIL:]}
        journal.write("failed", case.name, error=found)
    else:
        journal.write("ended", case.name, seconds=round(time.monotonic() - start, 2))
    finally:
        faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    sys.exit(main())
