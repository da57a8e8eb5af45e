"""Every program of scripts/ says what it does when asked for help, and does nothing else."""

from __future__ import annotations

import pytest

from tests.support.programs import run_module
from tests.support.repository import ROOT

OF_CHECKS = ("gpu.machine", "versions.private_names", "engines.sglang_command", "engines.vllm_omni_command")
PARTS = {f"scripts.checks.{name}" for name in (*OF_CHECKS, "stress.faults.fault_injection")}
"""Processes that other programs start."""


def programs() -> list[str]:
    files = [path for path in (ROOT / "scripts").rglob("*.py") if '__name__ == "__main__"' in path.read_text()]
    return sorted(".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__main__") for path in files)


@pytest.mark.long
@pytest.mark.parametrize("module", sorted(set(programs()) - PARTS))
def test_help_is_all_that_happens(module):
    done = run_module(module, "--help", timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.lstrip().lower().startswith("usage:")


def test_all_programs_are_found():
    assert set(programs()) > PARTS
    assert {"scripts.bench.planner", "scripts.reproduce.authors.fit", "scripts.training"} <= set(programs())
