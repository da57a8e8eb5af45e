"""scripts/gpu_suite from a bare checkout, at tiny sizes on the CPU, and what it does about cases that fail."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import time
import warnings
from collections import Counter
from pathlib import Path

import pytest
import torch

from dbsp_core.sources import SOURCES
from scripts.checks.gpu import suite, waits
from scripts.checks.gpu.journal import Case, Journal, Row
from scripts.checks.gpu.sessions import TINY, every_mask
from scripts.checks.gpu.setting import Setting
from scripts.checks.gpu.suite import STEPS, Step, run_steps
from scripts.checks.gpu.worker import run_case
from tests.gpu_node.runtime import why_unavailable
from tests.support import programs
from tests.support.interpreter import interpreted
from tests.support.repository import ROOT

SUITE = ROOT / "scripts" / "gpu_suite"
FAULTY = Step("faulty_step", 5, "fails", package="tests.scripts")
THERE = (
    *("torch", "torchgen", "functorch", "triton", "numpy", "safetensors", "yaml", "_yaml", "jinja2", "markupsafe"),
    *("sympy", "mpmath", "networkx", "filelock", "fsspec", "typing_extensions", "setuptools", "packaging"),
)
"""What a lent machine has of this environment's packages: torch, what torch needs, and a few more."""
BARE = f"""
import sys
from importlib.machinery import PathFinder

class OnlyThese(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        found = PathFinder.find_spec(name, path, target)
        installed = found is not None and "site-packages" in str(found.origin)
        return None if installed and name.partition(".")[0] not in {THERE} else found

sys.meta_path[:] = [*sys.meta_path[:2], OnlyThese]
"""


LONG = ("transformer", "ranks", "kernels", "rates", "nccl")
"""Steps whose dry run takes long, for they have many cases, kernels are interpreted, or processes started."""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Gives run(*arguments), which starts the suite as on a lent machine."""
    bare = tmp_path_factory.mktemp("bare")
    (bare / "sitecustomize.py").write_text(BARE)

    def start(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PYTHON": sys.executable, "PYTHONPATH": str(bare)}
        command = [str(SUITE), *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=540)

    return start


def results_of(run, folder: Path, how: str, steps) -> Path:
    """Returns the folder of a run of some steps."""
    pytest.importorskip("triton")
    done = run(how, "--steps", ",".join(steps), "--out", folder, "--earlier", folder / "kept")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].startswith("gpu_suite: ")
    return folder


@pytest.fixture(scope="module")
def dry(run, tmp_path_factory) -> Path:
    """Gives the folder of a dry run of the steps that take seconds."""
    return results_of(run, tmp_path_factory.mktemp("dry"), "--dry-run", set(STEPS) - set(LONG))


def entries(folder: Path, step: str) -> list[dict]:
    return [json.loads(line) for line in (folder / f"{step}.jsonl").read_text().splitlines()]


def skipped(folder: Path, step: str) -> set[str]:
    """Returns cases that were skipped in a step that is complete, and all of whose cases are right."""
    journal = Journal(step, (folder,), entries(folder, step)[0]["stamp"])
    outcomes = journal.outcomes()
    assert journal.complete()
    assert len(outcomes) > 1
    wrong = {case: outcome for case, outcome in outcomes.items() if not outcome.correct}
    assert not wrong, "".join(log.read_text() for log in folder.glob("*.log"))[-3000:]
    return {case for case, outcome in outcomes.items() if outcome.state == "skipped"}


@pytest.mark.parametrize("step", [step for step in STEPS if step not in LONG])
def test_dry_run_of_a_step_finds_every_case_right(dry, step):
    cases = {entry["case"] for entry in entries(dry, step)} - {""}
    assert skipped(dry, step) == (cases if step == "waits" else set())


@pytest.mark.long
def test_dry_run_of_long_steps_finds_every_case_right(run, tmp_path):
    results_of(run, tmp_path, "--dry-run", LONG)
    for step in LONG:
        assert skipped(tmp_path, step) == ({"diffusers' Wan"} if step == "transformer" else set())


@pytest.mark.parametrize("step", ["transformer", "ranks", "kernels", "rates"])
def test_first_case_of_a_long_step_is_right(tmp_path, step):
    pytest.importorskip("triton")
    journal = Journal(step, (tmp_path,), "a stamp")
    with interpreted():
        run_case(next(iter(importlib.import_module(f"scripts.checks.gpu.{step}").cases(Setting.tiny("cpu")))), journal)
    (outcome,) = journal.outcomes().values()
    assert (outcome.state, outcome.correct) == ("ended", True)


@pytest.mark.long
@pytest.mark.skipif(why_unavailable() is not None, reason=str(why_unavailable()))
def test_steps_on_simulated_gpus_find_every_case_right(run, tmp_path):
    """Runs the steps that simulated GPUs are for."""
    steps = "ranks", "waits", "video"
    results_of(run, tmp_path, "--simulate", steps)
    assert [skipped(tmp_path, step) for step in steps] == [set()] * 3


def test_every_mask_source_is_checked(tmp_path):
    checked = {mask["source"] for mask in every_mask(TINY, tmp_path).values()}
    assert set(SOURCES) - checked <= {"record_qk"}, "it computes no mask"


def run_here(monkeypatch, *arguments: str | Path) -> int:
    """Runs the suite in this process, with forked workers."""
    monkeypatch.setattr(sys, "argv", ["gpu_suite", *map(str, arguments)])
    with programs.children_forked():
        return suite.main()


def test_a_call_describes_the_machine_and_a_second_one_passes_over_what_is_complete(
    dry, tmp_path, monkeypatch, capsys
):
    arguments = ("--dry-run", "--steps", "planning", "--earlier", dry / "kept", "--out", tmp_path)
    assert run_here(monkeypatch, *arguments) == 0
    assert entries(tmp_path, "planning") == entries(dry, "planning")
    machine = json.loads((dry / "machine.json").read_text())
    assert (machine["dry_run"], machine["imports"]["diffusers"]) == (True, False)
    assert machine["versions"]["torch"] == torch.__version__
    assert "tables, on the host" in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(tmp_path, monkeypatch, capsys):
    assert run_here(monkeypatch, "--out", tmp_path, "--earlier", tmp_path) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert "--dry-run" in said.err


def test_waits_that_cuda_warns_of_are_counted_by_line(monkeypatch):
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda mode: None)
    warn = "warnings.warn('called a synchronizing CUDA operation (Triggered internally)')"
    paths = ("dbsp_core/runtime/chunk_attention.py", "tests/support/thread_group.py", "scripts/checks/gpu/waits.py")
    seen: Counter[str] = Counter()
    with waits.recorded_by_cuda():
        for path in (*paths, "dbsp_core/runtime/chunk_attention.py"):
            with waits.watched(seen):
                exec(compile(warn, str(ROOT / path), "exec"), {"warnings": warnings})
        exec(compile(warn, str(ROOT / paths[0]), "exec"), {"warnings": warnings})  # by a thread that is not watched
    assert [(where.split(" < ")[0], times) for where, times in seen.items()] == [
        ("dbsp_core/runtime/chunk_attention.py:1", 2)
    ]


def test_unknown_step_is_rejected(run):
    done = run("--steps", "rates,speed")
    assert done.returncode == 2
    assert "unknown steps: speed" in done.stderr


def journal_of(folder: Path, step: Step) -> Journal:
    """Returns the journal of a step that is run in forked workers."""
    journal = Journal(step.name, (folder,), "a stamp")
    with programs.children_forked():
        run_steps({step: journal}, time.monotonic() + 300, ["--dry-run"])
    return journal


def test_cases_that_fail_take_no_other_along(tmp_path, capsys, monkeypatch):
    journal = journal_of(tmp_path, FAULTY)
    found = journal.outcomes()
    assert {name: outcome.state for name, outcome in found.items()} == {
        **dict.fromkeys(("right", "breaks the device", "wrong", "not a number", "right again", ""), "ended"),
        **dict.fromkeys(("raises", "dies", "hangs"), "failed"),
        "not here": "skipped",
    }
    assert [name for name, outcome in found.items() if not outcome.correct] == [
        *("raises", "dies", "hangs", "wrong", "not a number")
    ]
    for name in ("raises", "dies", "hangs", "breaks the device"):
        assert [row["what"] for row in found[name].rows] == ["found before"]
    assert found["raises"].error["type"] == "RuntimeError"
    for name in ("raises", "dies", "hangs"):
        assert f"in {name}" in found[name].error["traceback"]
    assert found["right again"].pid not in {found[name].pid for name in ("dies", "hangs", "breaks the device")}
    assert [row["met"] for row in found["right"].rows] == [None, False]
    machine = {"devices": ["a GPU"], "commit": "c"}
    assert suite.report(machine, {}, False) == 0
    monkeypatch.setitem(STEPS, FAULTY.name, FAULTY)
    assert suite.report(machine, {FAULTY.name: journal}, False) == 1
    assert "gpu_suite: 3 of 9 cases right, 5 failed, 1 skipped" in capsys.readouterr().out


def worker(folder: Path, seconds: float) -> int:
    """Starts the process of the faulty step, and returns its exit status."""
    options = ["--stamp", "a stamp", "--folders", folder, "--seconds", seconds, "--dry-run"]
    command = [sys.executable, "-m", "scripts.checks.gpu.worker", "tests.scripts.faulty_step", *map(str, options)]
    return programs.run(command, cwd=ROOT).returncode


def test_a_step_that_cannot_start_is_recorded_and_not_tried_again(tmp_path):
    journal = journal_of(tmp_path, Step("no_step", 5, "is missing", package="tests.scripts"))
    (outcome,) = journal.outcomes().values()
    assert (outcome.state, journal.complete()) == ("failed", False)
    assert "ModuleNotFoundError" in outcome.error["traceback"]


def test_a_process_without_time_begins_no_case(tmp_path):
    assert worker(tmp_path, 0) == suite.OUT_OF_TIME
    assert not (tmp_path / "faulty_step.jsonl").exists()


def test_a_case_that_was_cut_off_is_begun_again_and_given_up_in_the_end(tmp_path):
    journal = Journal("faulty_step", (tmp_path,), "a stamp")
    journal.write("begun", "right")
    for _ in range(3):
        journal.write("begun", "raises")
    with (tmp_path / "faulty_step.jsonl").open("a") as file:
        file.write('{"kind": "row", "ca\n')  # its process was killed while it wrote
    worker(tmp_path, 100)
    found = journal.outcomes()
    assert (found["right"].state, found["right"].starts) == ("ended", 2)
    assert (found["raises"].error["type"], found["raises"].starts) == ("CutOff", 3)


def test_rows_go_to_every_folder_and_results_of_other_sources_count_for_nothing(tmp_path):
    folders = tmp_path / "a", tmp_path / "b"
    for folder in folders:
        folder.mkdir()
    old, new = (Journal("step", folders, stamp) for stamp in ("before", "after"))
    run_case(Case("a case", lambda: [Row("error", 0.0)]), old)
    old.write("ended", "")
    assert (old.complete(), new.complete(), new.outcomes()) == (True, False, {})
    assert entries(folders[0], "step") == entries(folders[1], "step") != []
