"""Several nodes of which one never comes: what is waited for is said, and why the run ends, when --timeout is over."""

from __future__ import annotations

from pathlib import Path

import pytest

from dbsp_cli.generate import launch as launching
from dbsp_cli.generate import running
from dbsp_cli.generate.job import GenerateJob, GenerateRequest, resolve
from dbsp_cli.generate.launch import Launch, Rendezvous
from dbsp_cli.generate.rank_output import LogFollower, RunFailed
from dbsp_cli.generate.running import run_job
from tests.cli.generate.cheap_ranks import wait_until
from tests.support.ports import free_port
from tests.support.programs import children_forked


def job(folder: Path, launch: Launch) -> GenerateJob:
    request = GenerateRequest(
        config="tiny-wan", prompt="x", host="para", nproc=1, launch=launch, out=folder / "ball.mp4", timeout=1
    )
    return resolve(request)


@pytest.fixture
def no_model(monkeypatch):
    monkeypatch.setattr(running, "make_tiny", lambda *_: None)
    monkeypatch.setattr(running, "silence_libraries", lambda: None)


@pytest.mark.parametrize("backend", ["static", "c10d"])
def test_a_node_that_never_comes(tmp_path, monkeypatch, no_model, backend):
    monkeypatch.setattr(launching, "_PATIENCE_S", 0.0)
    port = free_port()
    place = f"127.0.0.1:{port}"
    launch = Launch(nnodes=2, node_rank=0, master_addr="127.0.0.1", master_port=port)
    if backend == "c10d":
        launch = Launch(nnodes=2, rdzv_backend="c10d", rdzv_endpoint=place)
    told: list[str] = []
    with children_forked(), pytest.raises(RunFailed) as failed:
        run_job(asked := job(tmp_path, launch), LogFollower(1, on_notice=told.append))
    assert told == [f"dbsp: waiting for 1 of 2 nodes at {place}"]
    assert str(failed.value) == (
        f"not all 2 nodes came to {place} within 1 s; start this command on each, see that they can reach that port, "
        f"or have them wait longer with --timeout; torchrun's output is in {asked.log}"
    )


def test_torchrun_is_told_how_long_to_wait(tmp_path):
    launch = Launch(nnodes=3, rdzv_endpoint="node0:29400")
    command = job(tmp_path, launch).command(tmp_path)
    assert "--rdzv-conf=timeout=1,join_timeout=1,read_timeout=1" in command
    assert Launch(nnodes=2, node_rank=1, master_addr="node0").rendezvous(0.5) == Rendezvous(2, "node0:29500", 0.5)
    assert Launch().rendezvous(600) is None


def test_what_torchrun_says_is_told_apart(tmp_path):
    nodes = Rendezvous(4, "node0:29500", 90)
    taken = "torch.distributed.DistNetworkError: The server socket has failed … name: EADDRINUSE, message: …"
    assert nodes.complaint(tmp_path, taken) == (
        "the port of node0:29500 is taken; give another one, the same on all nodes"
    )
    late = "torch.distributed.DistNetworkError: The client socket has timed out after 90000ms"
    assert "not all 4 nodes came to node0:29500 within 90 s" in nodes.complaint(tmp_path, late)
    assert nodes.complaint(tmp_path, "ModuleNotFoundError: no torch") is None
    (tmp_path / "run" / "attempt_0").mkdir(parents=True)
    assert nodes.complaint(tmp_path, late) is None, "ranks were started, and say themselves what went wrong"


def test_nodes_that_have_met_are_not_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr(launching, "_PATIENCE_S", 0.0)
    asked: list[Path] = []
    monkeypatch.setattr(launching, "_have_met", lambda folder: asked.append(folder) or True)
    told: list[str] = []
    with Rendezvous(2, "node0:29500", 90).watched(tmp_path, told.append):
        wait_until(lambda: bool(asked))
    assert told == []
