"""scripts/gpu_suite from a bare checkout, at tiny sizes on the CPU, and what it does about cases that fail."""

from __future__ import annotations

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
from scripts.checks.gpu.journal import Case, Journal, Outcome, Row
from scripts.checks.gpu.sessions import TINY, every_mask
from scripts.checks.gpu.suite import STEPS, Step, run_step
from scripts.checks.gpu.worker import run_case
from tests.gpu_node.runtime import why_unavailable
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


def run(*arguments: str | Path, **more: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHON": sys.executable, "PYTHONPATH": "", **more}
    command = [str(SUITE), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)


def entries(folder: Path, step: str) -> list[dict]:
    return [json.loads(line) for line in (folder / f"{step}.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("step", STEPS)
def test_dry_run_of_a_step_finds_every_case_right(tmp_path, step):
    pytest.importorskip("triton")
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "sitecustomize.py").write_text(BARE)
    folders = "--out", tmp_path, "--earlier", tmp_path
    done = run("--dry-run", "--steps", step, *folders, PYTHONPATH=str(tmp_path / "bare"))
    outcomes = finished(done, tmp_path, step)
    skipped = {case for case, outcome in outcomes.items() if outcome.state == "skipped"}
    assert skipped == {"transformer": {"diffusers' Wan"}, "waits": set(outcomes) - {""}}.get(step, set())
    machine = json.loads((tmp_path / "machine.json").read_text())
    assert (machine["dry_run"], machine["imports"]["diffusers"]) == (True, False)
    assert machine["versions"]["torch"] == torch.__version__


@pytest.mark.skipif(why_unavailable() is not None, reason=str(why_unavailable()))
@pytest.mark.parametrize("step", ["ranks", "waits", "video"])
def test_step_on_simulated_gpus_finds_every_case_right(tmp_path, step):
    folders = "--out", tmp_path, "--earlier", tmp_path
    outcomes = finished(run("--simulate", "--steps", step, *folders), tmp_path, step)
    assert "skipped" not in {outcome.state for outcome in outcomes.values()}


def finished(done: subprocess.CompletedProcess[str], folder: Path, step: str) -> dict[str, Outcome]:
    """Outcomes of a step that is complete, and all of whose cases are right."""
    assert done.returncode == 0, (done.stdout + done.stderr, (folder / f"{step}.log").read_text()[-3000:])
    assert done.stdout.splitlines()[-1].startswith("gpu_suite: ")
    stamp = entries(folder, step)[0]["stamp"]
    journal = Journal(step, (folder,), stamp)
    outcomes = journal.outcomes()
    assert journal.complete()
    assert len(outcomes) > 1
    assert all(outcome.correct for outcome in outcomes.values())
    return outcomes


def test_every_mask_source_is_checked(tmp_path):
    checked = {mask["source"] for mask in every_mask(TINY, tmp_path).values()}
    assert set(SOURCES) - checked <= {"record_qk"}, "it computes no mask"


def test_a_second_call_passes_over_what_is_complete(tmp_path):
    calls = ["--dry-run", "--steps", "planning", "--earlier", tmp_path / "kept"]
    assert run(*calls, "--out", tmp_path / "first").returncode == 0
    done = run(*calls, "--out", tmp_path / "second")
    assert done.returncode == 0
    assert entries(tmp_path / "second", "planning") == entries(tmp_path / "first", "planning")
    assert "tables, on the host" in done.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(tmp_path):
    done = run("--out", tmp_path, "--earlier", tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert "--dry-run" in done.stderr


def test_waits_that_cuda_warns_of_are_counted_by_place(monkeypatch):
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda mode: None)
    warn = "warnings.warn('called a synchronizing CUDA operation (Triggered internally)')"
    places = ("dbsp_core/runtime/chunk_attention.py", "tests/support/thread_group.py", "scripts/checks/gpu/waits.py")
    seen: Counter[str] = Counter()
    with waits.recorded_by_cuda():
        for place in (*places, "dbsp_core/runtime/chunk_attention.py"):
            with waits.watched(seen):
                exec(compile(warn, str(ROOT / place), "exec"), {"warnings": warnings})
        exec(compile(warn, str(ROOT / places[0]), "exec"), {"warnings": warnings})  # by a thread that is not watched
    assert [(where.split(" < ")[0], times) for where, times in seen.items()] == [
        ("dbsp_core/runtime/chunk_attention.py:1", 2)
    ]


def test_unknown_step_is_rejected():
    done = run("--steps", "rates,speed")
    assert done.returncode == 2
    assert "unknown steps: speed" in done.stderr


def test_cases_that_fail_take_no_other_along(tmp_path, capsys):
    journal = Journal("faulty_step", (tmp_path,), "a stamp")
    run_step(FAULTY, journal, time.monotonic() + 300, ["--dry-run"])
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
    assert "in raises" in found["raises"].error["traceback"]
    assert "in dies" in found["dies"].error["traceback"]
    assert "in hangs" in found["hangs"].error["traceback"]
    assert found["right again"].pid not in {found[name].pid for name in ("dies", "hangs", "breaks the device")}
    assert [row["met"] for row in found["right"].rows] == [None, False]
    assert suite.report({"devices": ["a GPU"], "commit": "c"}, {}, False) == 0
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(STEPS, FAULTY.name, FAULTY)
        assert suite.report({"devices": ["a GPU"], "commit": "c"}, {FAULTY.name: journal}, False) == 1
    assert "gpu_suite: 3 of 9 cases right, 5 failed, 1 skipped" in capsys.readouterr().out


def worker(folder: Path, stamp: str, seconds: float) -> int:
    options = {"--module": "tests.scripts.faulty_step", "--stamp": stamp, "--folders": str(folder)}
    command = [
        sys.executable,
        "-m",
        "scripts.checks.gpu.worker",
        "faulty_step",
        "--seconds",
        str(seconds),
        "--dry-run",
    ]
    return subprocess.run([*command, *sum(options.items(), ())], cwd=ROOT, timeout=120).returncode


def test_a_step_that_cannot_start_is_recorded_and_not_tried_again(tmp_path):
    journal = Journal("no_step", (tmp_path,), "a stamp")
    run_step(Step("no_step", 5, "is missing", package="tests.scripts"), journal, time.monotonic() + 300, ["--dry-run"])
    (outcome,) = journal.outcomes().values()
    assert (outcome.state, journal.complete()) == ("failed", False)
    assert "ModuleNotFoundError" in outcome.error["traceback"]


def test_a_process_without_time_begins_no_case(tmp_path):
    assert worker(tmp_path, "a stamp", 0) == suite.OUT_OF_TIME
    assert not (tmp_path / "faulty_step.jsonl").exists()


def test_a_case_that_was_cut_off_is_begun_again_and_given_up_in_the_end(tmp_path):
    journal = Journal("faulty_step", (tmp_path,), "a stamp")
    journal.write("begun", "right")
    for _ in range(3):
        journal.write("begun", "raises")
    (tmp_path / "faulty_step.jsonl").open("a").write('{"kind": "row", "ca')  # its process was killed while it wrote
    (tmp_path / "faulty_step.jsonl").open("a").write("\n")
    worker(tmp_path, "a stamp", 100)
    found = journal.outcomes()
    assert (found["right"].state, found["right"].starts) == ("ended", 2)
    assert (found["raises"].error["type"], found["raises"].starts) == ("CutOff", 3)


def test_results_of_other_sources_count_for_nothing(tmp_path):
    old, new = (Journal("step", (tmp_path,), stamp) for stamp in ("before", "after"))
    run_case(Case("a case", lambda: [Row("error", 0.0)]), old)
    old.write("ended", "")
    assert (old.complete(), new.complete(), new.outcomes()) == (True, False, {})


def test_rows_go_to_every_folder(tmp_path):
    folders = tmp_path / "a", tmp_path / "b"
    for folder in folders:
        folder.mkdir()
    Journal("step", folders, "a stamp").row("a case", Row("error", 0.0))
    assert entries(folders[0], "step") == entries(folders[1], "step") != []
