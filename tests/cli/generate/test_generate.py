"""`dbsp generate`, whole: real processes, torchrun, files. Two ranks make what one process makes."""

from __future__ import annotations

import functools
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dbsp_cli.tiny_models import make_tiny
from dbsp_core.reports.run_report import RunReport
from tests.support.models.tiny_pipelines import SIZE, alone, load
from tests.support.nodes import two_nodes
from tests.support.programs import Program, run

TOLERANCE = 1e-5
PROMPT = "a red ball bounces over a blue floor"
SETTINGS = {"steps" if name == "num_inference_steps" else name: value for name, value in SIZE.items()}
SMALL = [part for name, value in SETTINGS.items() for part in ("--set", f"generate.{name}={value}")]
DBSP = [sys.executable, "-m", "dbsp_cli"]


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """Makes expected(model) give latents of stock diffusers in one process, with the same masks."""

    @functools.cache
    def latents(model: str) -> torch.Tensor:
        pipe = load(model, str(make_tiny(model, tmp_path_factory.mktemp("tiny") / model)))
        length = {"wan": 512, "cogvideox": 226}[model]
        return alone(pipe, f"tiny-{model}", prompt=PROMPT, seed=7, negative_prompt="", max_sequence_length=length)

    return latents


def command(config: str, out: Path, *arguments: object) -> list[str]:
    asked = ["generate", "--config", config, "--prompt", PROMPT, "--seed", "7", *SMALL, "--out", out, *arguments]
    return [*DBSP, *map(str, asked)]


def check_video(folder: Path, latents: torch.Tensor, ranks: int) -> None:
    assert (folder / "ball.mp4").stat().st_size > 1000
    report = RunReport.read(folder / "report" / "report.json")
    assert (report.world_size, report.framework, report.model[:5]) == (ranks, "diffusers", "tiny-")
    assert (folder / "report" / "report.html").is_file()
    made = load_file(folder / "report" / "latents.safetensors")["latents"]
    assert made.shape == latents.shape
    assert float((made - latents).abs().max()) <= TOLERANCE


def test_from_yaml_to_mp4(tmp_path, expected):
    # CogVideoX's size has heads enough: 6 on 2 ranks. In Wan's, blocks of 32 leave ragged ends.
    line = command("tiny-cogvideox", tmp_path / "ball.mp4", "--nproc", 2, "--report", tmp_path / "report")
    done = run(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 0, done.stderr
    check_video(tmp_path, expected("cogvideox"), 2)
    assert {path.name for path in tmp_path.iterdir()} == {"ball.mp4", "report"}
    summary, wrote, took = done.stdout.splitlines()
    assert summary.startswith("attention ")
    assert wrote == f"wrote {tmp_path / 'ball.mp4'} and {tmp_path / 'report' / 'report.html'}"
    assert re.fullmatch(r"1 video in [\d.]+ s", took)
    (in_force,) = (line for line in done.stderr.splitlines() if line.startswith("dbsp: tiny-cogvideox on 2 ranks"))
    assert "strategy U2R1, planner dbsp, layout contiguous, kernel cpu" in in_force
    assert "2/2" in done.stderr, "rank 0's bar is seen"
    assert "Warning" not in done.stderr


@pytest.mark.long
def test_two_nodes_make_the_video_of_one_process(tmp_path, expected, record_property, capsys):
    """Lets each node's torchrun start the command, which joins."""
    with two_nodes() as (nodes, what):
        record_property("nodes", what)
        with capsys.disabled():
            print(f"\ntwo nodes: {what}")
        runs = []
        for index, node in enumerate(nodes):
            folder = tmp_path / f"node{index}"
            options = ["--nnodes=2", "--nproc-per-node=1", f"--node-rank={index}"]
            options += [f"--master-addr={node.address}", f"--master-port={node.port}"]
            torchrun = [sys.executable, "-m", "torch.distributed.run", *options, "-m", "dbsp_cli"]
            asked = command("tiny-wan", folder / "ball.mp4", "--report", folder / "report")[len(DBSP) :]
            runs.append(
                Program(
                    [*node.prefix, *torchrun, *asked],
                    env={**os.environ, **node.environment},
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
            )
        said = [program.communicate(timeout=300)[0] for program in runs]
    assert [program.returncode for program in runs] == [0, 0], "\n".join(said)
    check_video(tmp_path / "node0", expected("wan"), 2)
    assert "strategy U1R2" in said[0], "heads are distributed within a node, blocks between nodes"
    assert not re.search("dbsp: tiny|wrote", said[1]), "rank 0 speaks for all"
    assert not (tmp_path / "node1").exists()


def test_a_rank_that_dies_is_named_and_leaves_nothing_half_written(tmp_path):
    """Kills rank 1 in the second step, as for want of memory: the other would wait for it."""
    mask = "{source: callable, function: 'tests.support.user_masks:dies_in_the_second_step', depends_on: step}"
    out, report = tmp_path / "ball.mp4", tmp_path / "report"
    out.write_text("an older video")
    line = command("tiny-wan", out, "--nproc", 2, "--report", report, "--set", f"mask={mask}")
    done = run(line)
    assert done.returncode == 1, done.stderr
    assert "dbsp: rank 1 was killed by signal 9; out of memory? see dmesg" in done.stderr
    assert done.stderr.count(f"dbsp: --out {out} already exists and will be replaced") == 1
    assert "the memory ran out" in done.stderr
    assert out.read_text() == "an older video"
    assert {path.name for path in tmp_path.iterdir()} == {"ball.mp4"}


@pytest.mark.long
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_ends_all_ranks_and_leaves_nothing_half_written(tmp_path, number, code):
    """Starts really, and finds processes by their command lines."""
    started = subprocess.Popen(
        command("tiny-wan", tmp_path / "ball.mp4", "--nproc", 2, "--set", "generate.steps=1000"),
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(number, signal.SIG_DFL),  # tests in the background, or under nohup, ignore it
    )
    said = b""
    try:
        while b"/1000 [" not in said and (more := os.read(started.stderr.fileno(), 1 << 16)):
            said += more
        assert len(processes_with(tmp_path)) == 1 + 2, "this one and two ranks"
        started.send_signal(number)
        said += started.communicate(timeout=120)[1]
    finally:
        started.kill()
    assert started.returncode == code, said
    assert b"Traceback" not in said
    end = time.monotonic() + 60
    while processes_with(tmp_path) and time.monotonic() < end:
        time.sleep(0.1)
    assert processes_with(tmp_path) == []
    assert list(tmp_path.iterdir()) == []


def processes_with(folder: Path) -> list[str]:
    """Returns command lines that name a folder."""
    lines = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            lines.append(path.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
        except OSError:  # it ended meanwhile
            continue
    return [line for line in lines if str(folder) in line]
