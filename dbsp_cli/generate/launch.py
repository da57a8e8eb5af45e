"""Ranks that something else has started, one process each: torchrun, Slurm's srun, or MPI."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from dbsp_core.utils.errors import UserError

__all__ = ["Joined"]

_STARTERS = (
    ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),  # torchrun
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),  # of srun, not of sbatch
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),  # MPICH, Intel MPI
)
"""Variables that say rank, ranks, rank on this node, and ranks on each node."""
_PORT = 29500  # torchrun's


@dataclass(frozen=True)
class Joined:
    """This process's place among ranks that are there.

    local, local_world: its number on its node, and how many are there;  address, port: where rank 0 is met
    """

    rank: int
    world: int
    local: int
    local_world: int
    address: str
    port: int

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Joined | None:
        """What the environment says; None where this process is the only one. Raises UserError where it says half."""
        for rank, world, local, local_world in _STARTERS:
            if not all(environment.get(name, "").isdecimal() for name in (rank, world, local)):
                continue
            count = int(environment[world])
            if count < 2:
                continue
            here = re.match(r"\d+", environment.get(local_world, ""))
            on_this_node = int(here[0]) if here else count
            port = int(environment.get("MASTER_PORT", _PORT + int(environment.get("SLURM_JOB_ID", "0")) % 1000))
            address = environment.get("MASTER_ADDR") or _address(environment, on_this_node == count)
            return cls(int(environment[rank]), count, int(environment[local]), on_this_node, address, port)
        return None

    def variables(self, gpus: int) -> dict[str, str]:
        """As torch.distributed reads them. gpus: that this process sees: only its own, where they were bound to it"""
        if 1 < gpus < self.local_world:
            raise UserError(
                f"{self.local_world} ranks were started on this node, which has {gpus} GPUs; start one each"
            )
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world),
            "LOCAL_RANK": str(self.local if gpus != 1 else 0),
            "LOCAL_WORLD_SIZE": str(self.local_world),
            "MASTER_ADDR": self.address,
            "MASTER_PORT": str(self.port),
        }


def _address(environment: Mapping[str, str], one_node: bool) -> str:
    """Of rank 0's node."""
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST")
    if nodes:  # such as "gpu[07-09,12],login": the first of the first brackets
        first = re.match(r"([^,\[]*)(?:\[([^,\-\]]+)[^\]]*\]([^,\[]*))?", nodes)
        if first:
            return "".join(part or "" for part in first.groups())
    if one_node:
        return "127.0.0.1"
    raise UserError(
        "ranks were started on several nodes, and nothing says where they meet; set MASTER_ADDR to rank 0's"
    )
