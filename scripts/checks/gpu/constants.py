"""`dbsp bench` on this GPU: constants of the latency model, which --publish writes to configs/hardware."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from scripts.checks.gpu.results import Case, Row, Skipped
from scripts.checks.gpu.setting import Setting
from scripts.checks.gpu.suite import REPO

MODEL = "wan2.1-t2v-14b"
SMALLER = """
import runpy
from dbsp_cli.commands import bench
bench._ON_CPU = 2, 512
runpy.run_module("dbsp_cli", run_name="__main__")
"""
"""A program that runs the command with fewer heads and tokens on a CPU."""


def cases(setting: Setting) -> Iterator[Case]:
    yield Case(f"dbsp bench {MODEL}", partial(bench, setting), limit_s=150, alone=True)


def bench(setting: Setting) -> Iterator[Row]:
    """Yields each constant that was measured, and the rates of kernels by blocks, in the units of a hardware file."""
    if setting.simulated:
        raise Skipped("simulated GPUs are those of one process")
    if importlib.util.find_spec("typer") is None:
        raise Skipped("the dbsp command needs typer and rich")
    with tempfile.TemporaryDirectory() as folder:
        out = str(Path(folder, "hardware.yaml"))
        program = ["-c", SMALLER] if setting.dry else ["-m", "dbsp_cli"]
        command = [sys.executable, *program, "bench", MODEL, "--out", out, "--json"]
        done = subprocess.run(command, cwd=REPO, stdout=subprocess.PIPE, text=True, check=True)
    found = json.loads(done.stdout)
    hardware = found["hardware"]
    for name, value in hardware["constants"].items():
        if hardware["sources"].get(name) == "measured":
            yield Row(name, value)
    for kernel, rates in hardware["kernels"].items():
        for blocks, flops_per_s in rates.get("flops_by_blocks", {}).items():
            yield Row(f"{kernel} {blocks} flops_per_s", flops_per_s)
        yield Row(f"{kernel} head_dim", rates["head_dim"])
    for part, residual in hardware["residuals"].items():
        yield Row(f"largest relative error of the fit of {part}", residual)
    for attention in found["attentions"]:
        what = f"density {attention['density']:.2f}, {attention['planner']}: predicted / measured"
        yield Row(what, attention["predicted_s"] / attention["seconds"])
