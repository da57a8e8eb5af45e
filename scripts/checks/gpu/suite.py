"""See scripts/gpu_suite."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[3]
PARTS = ("tests", "sanitizer", "measures")
SANITIZED = "test_every_mix_of_blocks and 128 and bfloat16 and triton or test_odd_shapes or partial or twin"


def main() -> int:
    parser = argparse.ArgumentParser(description="Checks the kernels on the GPU at hand, then measures them.")
    parser.add_argument("--out", default=os.environ.get("OUT", "out/gpu"), help="folder for kernels.json")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--minutes", type=float, default=8.5, help="measuring stops after so long, all parts together")
    parser.add_argument("--commit", default="", help="what the report names, where the checkout has no git history")
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes, on the CPU, in Triton's interpreter")
    args = parser.parse_args()
    start = time.monotonic()
    if args.dry_run:
        os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported

    import torch

    if not args.dry_run and not torch.cuda.is_available():
        print("scripts/gpu_suite needs a CUDA device; try it out with --dry-run", file=sys.stderr)
        return 2
    report: dict[str, Any] = {"dry_run": args.dry_run, **environment(args.commit)}
    # Tests that need a GPU skip themselves in a dry run: that they can be collected is what it checks.
    if "tests" in args.parts:
        report["tests"] = pytest_run([], limit=150)
    if "sanitizer" in args.parts:
        report["sanitizer"] = sanitizer_run()
    try:
        if "measures" in args.parts:
            report |= measure(args, start + 60 * args.minutes)
    finally:
        folder = Path(args.out)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "kernels.json").write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print_table(report)
    print(f"{time.monotonic() - start:.0f} s; {folder / 'kernels.json'}")
    failed = any(report.get(part, {}).get("exit", 0) for part in ("tests", "sanitizer"))
    return int(failed)


def environment(commit: str) -> dict[str, Any]:
    import numpy
    import torch
    import triton

    git = ["git", "-C", str(REPO), "describe", "--always", "--dirty", "--abbrev=12"]
    if not commit and shutil.which("git"):
        commit = subprocess.run(git, capture_output=True, text=True).stdout.strip()
    cuda = torch.cuda.is_available()
    return {
        "device": torch.cuda.get_device_name() if cuda else "CPU, Triton's interpreter",
        "multiprocessors": torch.cuda.get_device_properties(0).multi_processor_count if cuda else 0,
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "triton": triton.__version__,
            "numpy": numpy.__version__,
            "cuda": torch.version.cuda,
        },
        "commit": commit or "unknown",
        "date": time.strftime("%Y-%m-%d"),
    }


def pytest_run(wrapper: list[str], limit: float, *options: str) -> dict[str, Any]:
    """The kernels' tests on a GPU in a process of its own, under `wrapper`. Returns exit status and last line."""
    quiet = ["-q", "--disable-warnings", "-o", "addopts=--import-mode=importlib"]
    files = [f"tests/kernels/gpu/test_{name}.py" for name in ("gpu", "gpu_backward")]
    command = [*wrapper, sys.executable, "-m", "pytest", *quiet, *files, *options]
    try:
        done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=limit)
    except subprocess.TimeoutExpired:
        return {"exit": 124, "says": f"stopped after {limit} s"}
    lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    if done.returncode:
        print("\n".join(lines[-60:]))
    return {"exit": done.returncode, "says": lines[-1] if lines else ""}


def sanitizer_run() -> dict[str, Any]:
    """compute-sanitizer's memory checks over small kernels, where the tool is there."""
    if shutil.which("compute-sanitizer") is None:
        return {"exit": 0, "says": "compute-sanitizer is not on this machine"}
    wrapper = ["compute-sanitizer", "--tool", "memcheck", "--target-processes", "all", "--error-exitcode", "99"]
    return pytest_run(wrapper, 150, "-k", SANITIZED)


def measure(args: argparse.Namespace, deadline: float) -> dict[str, Any]:
    import torch

    from scripts.checks.gpu.clock import Sampler
    from scripts.checks.gpu.measures import everything
    from scripts.checks.gpu.setting import Setting

    torch.manual_seed(0)
    setting = Setting.tiny() if args.dry_run else Setting()
    rows = []
    complete = True
    for row in everything(setting, Sampler(setting.device, setting.samples)):
        rows.append({**asdict(row), "met": row.met})
        print(f"{row.what}: {row.value:.4g} {row.unit}", file=sys.stderr, flush=True)
        if time.monotonic() > deadline:
            complete = False
            break
    sizes = {key: str(value) if key == "dtype" else value for key, value in asdict(setting).items()}
    return {"setting": sizes, "complete": complete, "rows": rows}


def print_table(report: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    title = f"{report['device']}, {report['commit']}" + (", a dry run: numbers mean nothing" * report["dry_run"])
    table = Table("what", "value", "", "goal", "met", title=title)
    for row in report.get("rows", []):
        met = {True: "yes", False: "no", None: ""}[row["met"]]
        table.add_row(row["what"], f"{row['value']:.4g}", row["unit"], row["goal"], met)
    console = Console(width=120)
    console.print(table)
    for part in ("tests", "sanitizer"):
        if part in report:
            console.print(f"{part}: exit {report[part]['exit']}, {report[part]['says']}", markup=False)
    if not report.get("complete", True):
        console.print("stopped for lack of time: rows are missing")


if __name__ == "__main__":
    sys.exit(main())
