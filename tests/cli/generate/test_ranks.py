"""The ranks of a command: what each launcher says by its own variables, how many are started, which one failed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from dbsp_cli.generate import ranks
from dbsp_cli.generate.ranks import RankInfo, processes_here
from dbsp_cli.generate.videos import outputs_left
from dbsp_core.utils.errors import UserError
from tests.cli.generate.test_requests import decided

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
MEETING = {"MASTER_ADDR": "node0", "MASTER_PORT": "1234"}
SLURM = {
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
}
OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
MPICH = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
PALS = {"PMI_RANK": "3", "PMI_SIZE": "4", "PALS_RANKID": "3", "PALS_LOCAL_RANKID": "1", "PALS_LOCAL_SIZE": "2"}
CRAY = {"PMI_RANK": "3", "PMI_SIZE": "4", "PMI_LOCAL_RANK": "1", "PMI_LOCAL_SIZE": "2"}
MVAPICH = {f"MV2_COMM_WORLD_{name}": value for name, value in (("RANK", "3"), ("SIZE", "4"), ("LOCAL_RANK", "1"))}
FLUX = {"FLUX_TASK_RANK": "3", "FLUX_JOB_SIZE": "4", "FLUX_TASK_LOCAL_ID": "1"}
PYTORCH_JOB = {"RANK": "1", "WORLD_SIZE": "2", **MEETING}


class TestJoining:
    @pytest.mark.parametrize(
        ("environment", "local_world", "address", "port"),
        [
            (TORCHRUN | MEETING, 2, "node0", 1234),
            (SLURM | MEETING, 2, "node0", 1234),
            (SLURM | {"MASTER_ADDR": "node0", "MASTER_PORT": ""}, 2, "node0", 29500),
            (OPEN_MPI, 4, "127.0.0.1", 29500),
            (MPICH | {"MASTER_ADDR": "node0"}, 2, "node0", 29500),
            (PALS | MEETING, 2, "node0", 1234),
            (CRAY | MEETING, 2, "node0", 1234),
            (MVAPICH, 4, "127.0.0.1", 29500),
            (FLUX, 4, "127.0.0.1", 29500),
            (PYTORCH_JOB | OPEN_MPI, 4, "node0", 1234),
        ],
    )
    def test_each_launcher_is_understood(self, monkeypatch, environment, local_world, address, port):
        info = RankInfo.from_environment(environment)
        assert info == RankInfo(3, 4, 1, local_world, 4 // local_world, address, port)
        for name in (*TORCHRUN, *MEETING):
            monkeypatch.setenv(name, "")  # restored after the test
        info.export()
        world = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": str(local_world)}
        assert dict(os.environ) == dict(os.environ) | world | {"MASTER_ADDR": address, "MASTER_PORT": str(port)}

    @pytest.mark.parametrize(("local", "counted"), [(0, 1), (1, 2)])
    def test_ranks_of_slurm_on_unequal_nodes_know_the_number_of_nodes(self, local, counted):
        unequal = {"SLURM_STEP_NUM_TASKS": "5", "SLURM_STEP_TASKS_PER_NODE": "2(x2),1", "SLURM_STEP_NUM_NODES": "3"}
        info = RankInfo.from_environment(SLURM | MEETING | unequal | {"SLURM_LOCALID": str(local)})
        assert (info.local_world, info.nodes) == (counted, 3)

    @pytest.mark.parametrize(
        "environment",
        [
            {},
            {"RANK": "0", "WORLD_SIZE": "1"},  # of a pod that is alone
            {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "2"},  # the batch script itself
        ],
    )
    def test_a_process_that_is_alone_joins_nobody(self, environment):
        assert RankInfo.from_environment(environment) is None

    @pytest.mark.parametrize(
        ("environment", "message"),
        [
            (
                PYTORCH_JOB,
                "^RANK='1', WORLD_SIZE='2' say that there are several ranks, but LOCAL_RANK is missing or not a n",
            ),
            (TORCHRUN | {"WORLD_SIZE": "²"}, "but WORLD_SIZE is missing or not a number"),
            ({"PMI_RANK": "1", "PMI_SIZE": "2"}, "but MPI_LOCALRANKID is missing .* unset PMI_RANK and PMI_SIZE to"),
            (MPICH, "set MASTER_ADDR to rank 0's host, with Slurm: export"),
            (TORCHRUN | MEETING | {"MASTER_PORT": "65536"}, "^MASTER_PORT must be 1 to 65535, got '65536'"),
        ],
    )
    def test_an_environment_that_says_too_little_is_the_users_to_mend(self, environment, message):
        with pytest.raises(UserError, match=message) as raised:
            RankInfo.from_environment(environment)
        assert "\n" not in str(raised.value)
        assert len(str(raised.value)) < 600

    def test_ranks_of_unequal_nodes_take_one_strategy(self, tmp_path):
        nodes = {"WORLD_SIZE": "3", "GROUP_WORLD_SIZE": "2", "MASTER_ADDR": "node0"}
        first = {"RANK": "0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
        last = {"RANK": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        chosen = [decided(tmp_path, RankInfo.from_environment(nodes | one)).config.strategy for one in (first, last)]
        assert [*map(str, chosen)] == ["U3R1", "U3R1"]
        assert str(decided(tmp_path, RankInfo.from_environment(SLURM | MEETING)).config.strategy) == "U2R2"


@pytest.mark.parametrize(("gpus", "nproc", "count"), [(0, None, 1), (0, 3, 3), (8, None, 8), (8, 2, 2)])
def test_there_is_a_rank_for_each_gpu(monkeypatch, gpus, nproc, count):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert processes_here(nproc) == count
    if gpus:
        with pytest.raises(UserError, match=f"--nproc {gpus + 1} exceeds the {gpus} GPUs of this machine, each"):
            processes_here(gpus + 1)


def videos_to_make(rank: int, world: int, folder: str) -> list[tuple[str, int]]:
    """Returns prompts and seeds; prompts and videos that are there come from the folder of this rank."""
    own, out = Path(folder, str(rank)), f"{folder}/{rank}/{{index}}.mp4"
    asked = {"prompt": f"@{own / 'prompts'}", "seed": 7, "videos": 2, "out": out, "resume": True}
    generation = decided(own, RankInfo(rank, world, rank, world), **asked)
    return [(output.prompt, output.seed) for output in outputs_left(generation, torch.device("cpu"))]


def test_ranks_of_nodes_with_other_files_make_the_videos_of_rank_0(tmp_path, pool):
    for rank, prompts in enumerate(("a ball\na sea", "a sea")):
        (tmp_path / str(rank)).mkdir()
        (tmp_path / str(rank) / "prompts").write_text(prompts)
    (tmp_path / "0" / "0.mp4").write_bytes(b"made before")
    expected = [("a ball", 8), ("a sea", 7), ("a sea", 8)]
    assert pool(2).run(videos_to_make, str(tmp_path)) == [expected, expected]


@pytest.mark.parametrize(
    ("codes", "code", "explained"),
    [
        ({0: 1, 1: -9, 2: 1, 3: -15}, 1, "dbsp: rank 1 was killed by signal 9; out of memory? see dmesg\n"),
        ({0: 1, 1: 1, 2: -15}, 1, ""),  # they have said why themselves
        ({0: -11, 1: 1}, 1, "dbsp: rank 0 was killed by signal 11\n"),
    ],
)
def test_the_rank_that_was_killed_is_named(capsys, codes, code, explained):
    """Reads torchrun's ranks that had failed when it saw the first; it ends the others with SIGTERM."""
    assert ranks._explain(codes) == code
    assert capsys.readouterr().err == explained


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(("nodes", "where"), [("1", ""), ("2", " on node7")])
def test_rank_0_names_its_host_where_there_are_others(dbsp, monkeypatch, tmp_path, nodes, where):
    """Runs the command as rank 0, which makes nothing."""
    names = TORCHRUN | MEETING | {"RANK": "0", "LOCAL_RANK": "0", "GROUP_WORLD_SIZE": nodes}
    for name, value in names.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("socket.gethostname", lambda: "node7")
    monkeypatch.setattr("dbsp_cli.generate.videos.make_videos", lambda generation: {generation.left[0]: None})
    code, out, err = dbsp("generate", "--config", "tiny-wan", "--prompt", "a ball", "--out", tmp_path / "ball.mp4")
    assert code == 0, err
    assert out.splitlines()[0] == f"wrote {tmp_path / 'ball.mp4'}{where}"


@pytest.mark.usefixtures("one_rank")
def test_warnings_are_said_once_by_rank_0_of_those_that_a_launcher_started(dbsp, monkeypatch, tmp_path):
    """Runs the command as each rank in turn, which makes nothing."""
    line = ["generate", "--config", "tiny-wan", "--prompt", "a ball", "--out", tmp_path / "ball.mp4"]
    line += ["--set", "dense_schedule.first_steps=99"]
    monkeypatch.setattr("dbsp_cli.generate.videos.make_videos", lambda _: {})
    said = ""
    for rank in "01":
        names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"} | MEETING
        for name, value in names.items():
            monkeypatch.setenv(name, value)
        code, _, err = dbsp(*line)
        assert code == 0, err
        said += err
    assert said.count("dbsp: dense_schedule makes all") == 1, said
