"""A process of the GPU suite that runs cases, one at a time, as it is asked to: python -m scripts.checks.gpu.worker.

It answers in lines of JSON: first a description of the machine and a list of all cases; then, for each line on its
standard input that names a part and a case, rows as they are found, and the outcome. What else is printed goes to
standard error.
"""

from __future__ import annotations

import argparse
import faulthandler
import importlib
import json
import os
import pkgutil
import queue
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING

from scripts.checks.gpu.results import Case, Key, Skipped

if TYPE_CHECKING:
    from scripts.checks.gpu.setting import Setting

Say = Callable[..., None]  # writes a line with the keyword arguments


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--parts", nargs="+", required=True, metavar="NAME=MODULE:FUNCTION", help="of a setting")
    parser.add_argument("--lanes", type=int, default=1, help="workers that share the processors")
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--simulate", action="store_true", help="on tests/gpu_node's simulated GPUs")
    parser.add_argument("--case", nargs=2, metavar=("PART", "CASE"), help="run this case alone; status 1: not correct")
    args = parser.parse_args()
    faulthandler.enable()
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def say(**entry: object) -> None:
        print(json.dumps(entry), file=answers, flush=True)

    # 1. The device, and the cases.
    setting = prepared(args)
    parts = dict(part.split("=") for part in args.parts)
    cases = {
        Key(name, case.name): case
        for name, function in parts.items()
        for case in pkgutil.resolve_name(function)(setting)
    }
    # 2. One case, for a tool that watches this process.
    if args.case is not None:
        rows = list(cases[Key(*args.case)].run())
        return int(not all(row.correct for row in rows))
    # 3. Those that the suite asks for.
    from scripts.checks.gpu.machine import described

    say(machine=described(setting), cases=[[*key, case.alone] for key, case in cases.items()])
    requests: queue.SimpleQueue[Key] = queue.SimpleQueue()
    threading.Thread(target=take_requests, args=(requests,), daemon=True).start()
    while True:
        run_case(cases[requests.get()], setting, say)
        if not setting.device_works():
            return 1  # another process goes on
        say(ready=True)


def take_requests(requests: queue.SimpleQueue[Key]) -> None:
    """Takes the suite's requests, and ends this process and its ranks once the suite has ended."""
    for line in sys.stdin:
        requests.put(Key(*json.loads(line)))
    os.killpg(0, signal.SIGKILL)


def prepared(args: argparse.Namespace) -> Setting:
    """Imports torch as the run needs it, and returns the sizes."""
    if args.dry_run:
        os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported
    if args.simulate:
        importlib.import_module("tests.gpu_node.node").start_devices()  # before torch is imported
    elif args.dry_run:
        importlib.import_module("tests.support.interpreter")  # makes it faster
    import torch

    from scripts.checks.gpu.setting import Setting

    # tiny sizes gain nothing from threads, which take the processor from each other
    torch.set_num_threads(1 if args.dry_run else max(1, (os.cpu_count() or 1) // args.lanes))
    return Setting.tiny("cuda" if args.simulate else "cpu") if args.dry_run else Setting()


def run_case(case: Case, setting: Setting, say: Say) -> None:
    """Runs a case, and says what it finds as it finds it, its exception included."""
    import torch

    print(f"\n{case.name}", file=sys.stderr, flush=True)
    faulthandler.dump_traceback_later(case.limit_s, exit=True)
    torch.manual_seed(0)
    # What torch leaves uninitialised is filled with NaN, but where it would be timed.
    torch.use_deterministic_algorithms(not case.alone, warn_only=True)
    say(begun=case.limit_s)
    start, state, reason = time.monotonic(), "ended", ""
    try:
        for row in case.run():
            say(row=asdict(row))
    except Skipped as skipped:
        state, reason = "skipped", str(skipped)
    except Exception as error:
        traceback.print_exc()
        state, reason = "failed", f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    finally:
        faulthandler.cancel_dump_traceback_later()
    say(state=state, error=reason, seconds=round(time.monotonic() - start, 2))


if __name__ == "__main__":
    sys.exit(main())
