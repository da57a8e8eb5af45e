"""scripts/gpu_suite from a bare checkout, on simulated GPUs at tiny sizes, and what it does about cases that fail."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
import warnings
from collections import Counter
from pathlib import Path

import pytest
import torch

from dbsp_core.cost import machine as machines
from dbsp_core.sources import SOURCES
from scripts.checks.gpu import publish, ranks, suite
from scripts.checks.gpu.results import RESULTS, Key, Outcome, Results, Row, read_results
from scripts.checks.gpu.sessions import every_mask
from scripts.checks.gpu.suite import PARTS, Part
from scripts.results.result import Result
from tests.docs import results as pages
from tests.gpu_node.runtime import why_unavailable
from tests.support import programs
from tests.support.repository import ROOT

SUITE = ROOT / "scripts" / "gpu_suite"
FAULTY = Part("faulty_part", "fails", "tests.scripts.faulty_part:cases")
THERE = (
    *("torch", "torchgen", "functorch", "triton", "numpy", "safetensors", "yaml", "_yaml", "jinja2", "markupsafe"),
    *("sympy", "mpmath", "networkx", "filelock", "fsspec", "typing_extensions", "setuptools", "packaging"),
)
"""What a bare GPU machine has of this environment's packages: torch, what torch needs, and a few more."""
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
SKIPPED = {"safety", "nccl", "constants"}
"""Parts in which cases need a GPU, or several processes, or the command line's packages."""


@pytest.fixture
def run(tmp_path):
    """Gives run(*arguments), which starts the suite as on a bare GPU machine."""
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "sitecustomize.py").write_text(BARE)

    def start(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PYTHON": sys.executable, "PYTHONPATH": str(bare), "OMP_NUM_THREADS": "1"}
        command = [str(SUITE), *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=540)

    return start


def check_whole_run(done: subprocess.CompletedProcess[str], folder: Path, skipped: set[str]) -> None:
    """Checks that every case was right or skipped, in a short report and two files."""
    machine, outcomes = read_results(folder / RESULTS)
    log = (folder / suite.LOGS).read_text()
    wrong = {key: outcome.error for key, outcome in outcomes.items() if not outcome.correct or outcome.state == "slow"}
    assert wrong == {}, log[-5000:]
    assert done.returncode == 0, done.stdout + done.stderr
    assert {key.part for key in outcomes} == {part.name for part in PARTS}
    assert {key.part for key, outcome in outcomes.items() if outcome.state == "skipped"} == skipped
    lines = done.stdout.splitlines()
    assert len(lines) <= suite.MOST_LINES
    assert max(map(len, lines)) < 200
    right = sum(outcome.state == "ended" for outcome in outcomes.values())
    assert lines[-1].startswith(f"gpu_suite: {right} of {len(outcomes)} cases right, 0 failed, 0 slow")
    assert sorted(path.name for path in folder.iterdir()) == [suite.LOGS, RESULTS]
    assert (machine["imports"]["diffusers"], machine["versions"]["torch"]) == (False, torch.__version__)


@pytest.mark.skipif(why_unavailable() is not None, reason=str(why_unavailable()))
def test_every_part_is_right_on_simulated_gpus(run, tmp_path):
    pytest.importorskip("triton")
    done = run("--simulate", "--minutes", "8", "--out", tmp_path / "out")
    check_whole_run(done, tmp_path / "out", SKIPPED)


@pytest.mark.long
def test_every_part_is_right_on_the_cpu(run, tmp_path):
    pytest.importorskip("triton")
    done = run("--dry-run", "--out", tmp_path / "out")
    check_whole_run(done, tmp_path / "out", {"ranks", "safety", "constants"})


def test_every_mask_source_is_checked(tmp_path):
    checked = {mask["source"] for mask in every_mask(tmp_path).values()}
    assert set(SOURCES) - checked <= {"record_qk"}, "it computes no mask"


def run_here(monkeypatch, *arguments: str | Path) -> int:
    """Runs the suite in this process, with forked workers."""
    monkeypatch.setattr(sys, "argv", ["gpu_suite", *map(str, arguments)])
    with programs.children_forked():
        return suite.main()


def run_faulty(monkeypatch, folder: Path, *arguments: str) -> int:
    monkeypatch.setattr(suite, "PARTS", (FAULTY,))
    return run_here(monkeypatch, "--dry-run", "--out", folder, *arguments)


def test_cases_that_fail_take_no_other_along(tmp_path, capsys, monkeypatch):
    assert run_faulty(monkeypatch, tmp_path) == 1
    _, outcomes = read_results(tmp_path / RESULTS)
    found = {key.case: outcome for key, outcome in outcomes.items()}
    assert {name: outcome.state for name, outcome in found.items()} == {
        **dict.fromkeys(("right", "breaks the device", "wrong", "not a number", "right again"), "ended"),
        **dict.fromkeys(("raises", "dies"), "failed"),
        "hangs": "slow",
        "not here": "skipped",
    }
    wrong = [name for name, outcome in found.items() if not outcome.correct]
    assert wrong == ["raises", "dies", "wrong", "not a number"]
    for name in ("raises", "dies", "hangs", "breaks the device"):
        assert [row.what for row in found[name].rows] == ["found before"]
    log = (tmp_path / suite.LOGS).read_text()
    for name in ("raises", "dies", "hangs"):
        assert f"in {name}" in log
    assert found["raises"].error == "RuntimeError: a kernel failed"
    assert [row.met for row in found["right"].rows] == [None, False]
    said = capsys.readouterr().out.splitlines()
    assert said[-1] == "gpu_suite: 3 of 9 cases right, 4 failed, 1 slow, 1 skipped"
    assert said.index("not right:") < said.index("  right: a rate: 3, goal ≥ 4: NO") == len(said) - 2


def test_a_later_call_goes_on_and_runs_what_was_right_under_other_sources_last(tmp_path, monkeypatch):
    machine = {"devices": ["a GPU"], "how": "GPU", "sources": "before", "commit": "c"}
    first, second = Key("a", "right"), Key("a", "failed")
    results = Results(tmp_path, machine)
    results.record(first, Outcome("ended", "before", rows=[Row("error", 0.0, limit=1.0)]))
    results.record(second, Outcome("failed", "before", error="it raised"))
    again = Results(tmp_path, machine)
    assert again.outcomes == results.outcomes
    assert all(map(again.is_done, (first, second)))
    changed = Results(tmp_path, machine | {"sources": "after"})
    assert [changed.is_done(key) for key in (first, second)] == [False, False]
    assert [changed.is_older(key) for key in (first, second)] == [True, False]
    assert Results(tmp_path, machine | {"devices": ["another"]}).outcomes == {}
    asked: list[Key] = []

    class Recorder:
        def run(self, key: Key, sources: str, deadline: float) -> Outcome:
            asked.append(key)
            return Outcome("ended", sources)

    cases = [(key, False) for key in (first, second, Key("a", "new"))]
    suite.run_cases(cases, [Recorder()], changed, time.monotonic() + 60)
    assert asked == [second, Key("a", "new"), first]
    assert all(changed.is_done(key) for key, _ in cases)


def test_a_call_that_ends_in_a_case_leaves_it_open(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(suite.Worker, "run", lambda self, key, sources, deadline: None)
    assert run_faulty(monkeypatch, tmp_path) == 0
    assert not (tmp_path / RESULTS).exists()
    assert "call it again for cases that are left: 9 of faulty_part" in capsys.readouterr().out


def test_timed_cases_run_alone():
    running, most = Counter[str](), Counter[str]()

    class Watcher:
        def run(self, key: Key, sources: str, deadline: float) -> None:
            running[key.part] += 1
            most[key.part] = max(most[key.part], running.total())
            time.sleep(0.02)
            running[key.part] -= 1

    cases = [(Key(part, str(number)), part == "alone") for part in ("many", "alone") for number in range(6)]
    empty = Results(Path("nowhere"), {"sources": "", "devices": [], "how": ""})
    suite.run_cases(cases, [Watcher() for _ in range(3)], empty, time.monotonic() + 60)
    assert most["alone"] == 1
    assert most["many"] > 1


def test_waits_that_cuda_warns_of_are_counted_by_line(monkeypatch):
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda mode: None)
    warn = "warnings.warn('called a synchronizing CUDA operation (Triggered internally)')"
    paths = ("dbsp_core/runtime/chunk_attention.py", "tests/support/thread_group.py", "scripts/checks/gpu/ranks.py")
    seen: Counter[str] = Counter()
    with ranks.recorded_by_cuda():
        for path in (*paths, "dbsp_core/runtime/chunk_attention.py"):
            with ranks.watched(seen):
                exec(compile(warn, str(ROOT / path), "exec"), {"warnings": warnings})
        exec(compile(warn, str(ROOT / paths[0]), "exec"), {"warnings": warnings})  # by a thread that is not watched
    assert [(where.split(" < ")[0], times) for where, times in seen.items()] == [
        ("dbsp_core/runtime/chunk_attention.py:1", 2)
    ]


@pytest.fixture
def repository(tmp_path, monkeypatch) -> Path:
    """Gives a copy of what --publish changes."""
    copy = tmp_path / "repository"
    for name in (*publish.PAGES, "docs/results/evidence.yaml", "docs/results/seconds.csv", "configs/hardware"):
        source, target = ROOT / name, copy / name
        target.parent.mkdir(parents=True, exist_ok=True)
        (shutil.copytree if source.is_dir() else shutil.copyfile)(source, target)
    monkeypatch.setattr(publish, "REPO", copy)
    for module in (publish, machines):
        monkeypatch.setattr(module, "SHIPPED", copy / "configs" / "hardware")
    monkeypatch.setattr(pages, "ROOT", copy)
    return copy


def invented(folder: Path, **machine: object) -> Path:
    """Writes a folder of results with numbers that nobody measured."""
    described = {"devices": ["NVIDIA H100 80GB HBM3"], "how": "GPU", "sources": "s", "commit": "0123456789ab"}
    results = Results(folder, described | {"date": "2026-12-01 10:00:00"} | machine)
    rates = [Row("error of late, 128 queries", 1e-3, limit=8e-3)]
    for density in publish.DENSITIES:
        rates += [Row(f"late, 128 queries, density {density}", 444.4, "TFLOP/s")]
        rates += [Row(f"{what}, density {density}", 0.77) for what in ("rate / best dense", "gain over best dense")]
    balance = [Row(f"{planner}: slowest / mean, in time", 1.25) for planner in ("contiguous", "dbsp")]
    constants = [Row("flops_per_s", 4e14), Row("pack_bytes_per_s", 9e11), Row("triton 128x128 flops_per_s", 5e14)]
    constants += [Row("triton head_dim", 128.0), Row("dense_flops_per_s", 6e14)]
    for key, rows in {
        Key("rates", "14B, 128×64, D 128, bfloat16"): rates,
        Key("balance", "14B, density 0.4, U8R1"): [*balance, Row("contiguous / dbsp", 1.27)],
        Key("steady", "14B, U8R1, static"): [Row("on the device", 12.5, "ms"), Row("on the host", 0.5, "ms")],
        Key("constants", "dbsp bench wan2.1-t2v-14b"): constants,
    }.items():
        results.record(key, Outcome("ended", "s", rows=rows))
    return folder


def test_results_are_published(repository, tmp_path, monkeypatch):
    videos = Result("seconds", "").read(repository / "docs/results")
    for video in (video for video in videos if video.machine == "h100"):
        video.dbsp_s = 111.0
    monkeypatch.setattr(publish.seconds, "rows", lambda: videos)  # modelling them takes long
    assert publish.publish(invented(tmp_path)) == 0
    # 1. Constants, with their labels; others are as before.
    hardware, before = machines.load_hardware("h100"), machines._read(ROOT / "configs/hardware/h100.yaml", 0)
    assert (hardware.constants.flops_per_s, hardware.constants.pack_bytes_per_s) == (4e14, 9e11)
    assert hardware.constants.exchange_bytes_per_s == before.constants.exchange_bytes_per_s
    assert (hardware.sources["flops_per_s"], hardware.sources["overlap"]) == ("measured", "assumed")
    assert hardware.kernels["triton"].flops_by_blocks == {"128x128": 5e14}
    assert (hardware.kernels["triton"].head_dim, hardware.constants.dense_flops_per_s) == (128, 6e14)
    assert "sparge" in hardware.kernels
    # 2. Results, and pages.
    assert len(pages.rows("gpu-h100")) == 23
    assert pages.rows("seconds", machine="h100")[0]["dbsp_s"] == "111.0"
    assert (repository / "docs/results/evidence.yaml").read_text().count("gpu-h100.csv") == 1
    readme = " ".join((repository / "README.md").read_text().split())
    assert "**On a GPU**: 4 cases right, 0 wrong, on one NVIDIA H100 80GB HBM3 ([measured]" in readme
    table = pages.table("README.md", "| model, video | mask | density |")
    assert [row[3] for row in table] == ["H100", *["H100", "H200"] * 4], "one of the H200's is slower than dense"
    kernels = pages.table("docs/kernels.md", "| blocks | density 0.2 |")
    assert kernels == [["128×64", *(len(publish.DENSITIES) * ["444, 0.77×"])]]
    calls = pages.table("docs/kernels.md", "| steady call of a rank of 8 |")
    assert calls == [["14B, U8R1", "12.50, 0.50", "–"]]
    assert "takes 1.27 times as long" in (repository / "docs/kernels.md").read_text()
    # 3. Another time changes nothing.
    files = {path: path.read_text() for path in repository.rglob("*.*") if path.is_file()}
    assert publish.publish(tmp_path) == 0
    assert files == {path: path.read_text() for path in files}


@pytest.mark.parametrize(
    ("machine", "said"),
    [
        ({"how": "dry run, times mean nothing"}, "run scripts/gpu_suite on a GPU"),
        ({"commit": "unknown"}, "of other sources"),
        ({"commit": "0123456789ab-dirty"}, "of other sources"),
    ],
)
def test_what_was_not_measured_is_not_published(repository, tmp_path, capsys, machine, said):
    before = (repository / "README.md").read_text()
    assert publish.publish(invented(tmp_path, **machine)) == 2
    assert said in capsys.readouterr().err
    assert (repository / "README.md").read_text() == before
