"""Ranks that something else has started: what each of the launchers says, by its own variables."""

from __future__ import annotations

import pytest

from dbsp_cli.generate.job import GenerateRequest, resolve
from dbsp_cli.generate.launch import JoinedRank, Launch
from dbsp_core.utils.errors import UserError

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
MEETING = {"MASTER_ADDR": "node0", "MASTER_PORT": "1234"}
SLURM = {
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
    "SLURM_JOB_ID": "4321",
}
OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
MPICH = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}


@pytest.mark.parametrize(
    ("environment", "local_world", "address", "port"),
    [
        (TORCHRUN | MEETING, 2, "node0", 1234),
        (SLURM, 2, "gpu07", 29500 + 321),
        (SLURM | MEETING, 2, "node0", 1234),
        (SLURM | {"SLURM_JOB_ID": "x", "MASTER_PORT": ""}, 2, "gpu07", 29500),
        (OPEN_MPI, 4, "127.0.0.1", 29500),
        (MPICH | {"MASTER_ADDR": "node0"}, 2, "node0", 29500),
    ],
)
def test_each_launcher_is_understood(environment, local_world, address, port):
    joined = JoinedRank.of(environment)
    assert joined == JoinedRank(3, 4, 1, local_world, address, port)
    assert joined.variables(gpus=8) == {
        "RANK": "3",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": str(local_world),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
    }


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("node0", "node0"), ("a,b[1-2]", "a"), ("n[3,5-7]", "n3"), ("n[01-16],m1", "n01"), ("r[1-2]n[1-4]", "r1n")],
)
def test_ranks_of_slurm_meet_on_the_first_node(nodes, first):
    address = JoinedRank.of(SLURM | {"SLURM_STEP_NODELIST": nodes}).address
    assert address.startswith(first)


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"RANK": "0", "WORLD_SIZE": "2"},  # of a pod, in which torchrun is yet to be started
        {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "2"},  # the batch script itself
        TORCHRUN | {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"},
        TORCHRUN | {"WORLD_SIZE": "²"},
        TORCHRUN | {"WORLD_SIZE": "9" * 5000},  # more digits than Python reads
    ],
)
def test_a_process_that_is_alone_starts_its_own(environment):
    assert JoinedRank.of(environment) is None


def test_a_gpu_bound_to_its_rank_is_the_first_one_that_it_sees():
    joined = JoinedRank.of(SLURM)
    assert joined.variables(gpus=1)["LOCAL_RANK"] == "0"
    assert joined.variables(gpus=0)["LOCAL_RANK"] == "1"
    with pytest.raises(UserError, match="5 ranks were started on this node, which has 4 GPUs"):
        JoinedRank(1, 5, 1, 5, "a", 1).variables(gpus=4)


def test_nowhere_to_meet_is_the_users_to_mend():
    with pytest.raises(UserError, match="set MASTER_ADDR to rank 0's"):
        JoinedRank.of(MPICH)


@pytest.mark.parametrize("port", ["http", "0", "65536", "9" * 5000], ids=lambda port: port[:9])
def test_a_port_that_is_none_is_the_users_to_mend(port):
    with pytest.raises(UserError, match=f"^MASTER_PORT='{port}' is no port"):
        JoinedRank.of(TORCHRUN | MEETING | {"MASTER_PORT": port})


def test_a_job_joins_unless_it_is_told_how_to_start_ranks(tmp_path, monkeypatch):
    for name, value in SLURM.items():
        monkeypatch.setenv(name, value)
    asked = {"config": "tiny-wan", "prompt": "x", "host": "para", "out": tmp_path / "ball.mp4"}
    job = resolve(GenerateRequest(**asked))
    assert (job.launch.world, job.launch.leads, str(job.config.strategy)) == (4, False, "U2R2")
    assert job.log == tmp_path / "ball.rank3.log"
    assert "torch.distributed.run" not in job.command(tmp_path)
    for told in ({"nproc": 2}, {"launch": Launch(nnodes=2, node_rank=0, master_addr="a")}):
        assert "torch.distributed.run" in resolve(GenerateRequest(**asked, **told)).command(tmp_path)
