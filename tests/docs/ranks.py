"""Ranks that run a page's program or an example."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from tests.support.programs import run


def run_on_ranks(ranks: int, folder: Path, script: str, *arguments: str) -> tuple[dict[str, str], str]:
    """Runs a script of a folder by torchrun, on CPUs. Returns what each rank wrote, by rank, and all ranks' errors.

    Each rank has a log of its own: two ranks' lines in one pipe may run into each other.
    """
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}", "--redirects=3"]
    logs = folder / f"{script}.logs"
    shutil.rmtree(logs, ignore_errors=True)  # of the run before
    environment = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, *launch, f"--log-dir={logs}", script, *arguments]
    done = run(command, cwd=folder, env=os.environ | environment)
    errors = "\n".join(log.read_text() for log in logs.rglob("stderr.log"))
    assert done.returncode == 0, (done.stderr[-1000:], errors[-3000:])
    return {log.parent.name: log.read_text() for log in logs.rglob("stdout.log")}, errors
