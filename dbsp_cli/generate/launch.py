"""The ways that a run's ranks start: by torchrun on one node or several, or earlier, by Slurm or MPI."""

from __future__ import annotations

import math
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from dbsp_core.utils.errors import UserError
from dbsp_core.utils.process import environment_number
from dbsp_start.module import module_command

__all__ = ["JoinedRank", "Launch", "Rendezvous"]

_STARTERS = (
    ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),  # torchrun
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),  # of srun, not of sbatch
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),  # MPICH, Intel MPI
)
"""Variables that say rank, ranks, rank on this node, and ranks on each node."""
_PORT = 29500  # torchrun's default
_MAX_PROCESSES = 4096
_PATIENCE_S = 20.0  # as long as it may take to start the command by hand on the next node
_NEVER_CAME = re.compile(r"\b(DistStoreError|DistNetworkError|RendezvousTimeoutError|RendezvousConnectionError)\b")


@dataclass(frozen=True)
class JoinedRank:
    """This process's place among ranks that another program has started, one process each.

    Attributes:
        local: Rank on this node.
        local_world: Number of ranks on this node.
        address: Host of rank 0, where ranks meet at `port`.
    """

    rank: int
    world: int
    local: int
    local_world: int
    address: str
    port: int

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> JoinedRank | None:
        """Returns what the environment says, None where this process is the only one.

        Raises:
            UserError: Nothing says where ranks of several nodes meet, or MASTER_PORT is no port.
        """
        for *placed, local_world in _STARTERS:
            rank, world, local = (environment_number(name, environment) for name in placed)
            if rank is None or world is None or local is None or world < 2:
                continue
            here = re.match(r"[1-9]\d{0,8}", environment.get(local_world, ""))  # of Slurm's "2(x3),1"
            on_this_node = int(here[0]) if here else world
            address = environment.get("MASTER_ADDR") or _address(environment, on_this_node == world)
            return cls(rank, world, local, on_this_node, address, _port(environment))
        return None

    def variables(self, gpus: int) -> dict[str, str]:
        """Environment variables as torch.distributed reads them.

        Args:
            gpus: Number of GPUs that this process sees; 1 where each rank is bound to its own.
        """
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


def _port(environment: Mapping[str, str]) -> int:
    """Returns the port where ranks meet, which several jobs on a machine do not share."""
    given = environment.get("MASTER_PORT")
    if not given:
        return _PORT + (environment_number("SLURM_JOB_ID", environment) or 0) % 1000
    port = environment_number("MASTER_PORT", environment)
    if port is None or not 0 < port < 65536:
        raise UserError(f"MASTER_PORT={given!r} is no port; set a number from 1 to 65535, or none")
    return port


def _address(environment: Mapping[str, str], one_node: bool) -> str:
    """Returns the host of rank 0's node."""
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


@dataclass(frozen=True)
class Rendezvous:
    """The meeting of several nodes' torchruns before they start ranks.

    Attributes:
        place: HOST:PORT.
        seconds: How long a node waits for the others.
    """

    nodes: int
    place: str
    seconds: float

    @property
    def option(self) -> str:
        """torchrun's option for its two ways to meet."""
        seconds = math.ceil(self.seconds)
        return "--rdzv-conf=" + ",".join(f"{name}={seconds}" for name in ("timeout", "join_timeout", "read_timeout"))

    @contextmanager
    def watched(self, ranks_folder: Path, tell: Callable[[str], object]) -> Iterator[None]:
        """Tells the user once which nodes are waited for, where ranks are long in starting.

        Args:
            ranks_folder: torchrun's folder for its ranks' output.
        """

        def look() -> None:
            if not _have_met(ranks_folder):
                missing = f"{self.nodes - 1} of {self.nodes}" if self.nodes == 2 else f"some of {self.nodes}"
                tell(f"waiting for {missing} nodes at {self.place}")

        timer = threading.Timer(_PATIENCE_S, look)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def complaint(self, ranks_folder: Path, last_words: str) -> str | None:
        """Says why torchrun started no rank, where that is because nodes did not meet; else None."""
        if _have_met(ranks_folder):
            return None
        if "EADDRINUSE" in last_words:
            return f"the port of {self.place} is taken; give another one, the same on all nodes"
        if _NEVER_CAME.search(last_words):
            return (
                f"not all {self.nodes} nodes came to {self.place} within {self.seconds:g} s; start this command on "
                "each, see that they can reach that port, or have them wait longer with --timeout"
            )
        return None


def _have_met(ranks_folder: Path) -> bool:
    """torchrun makes folders for its ranks' output when it starts them."""
    return any(ranks_folder.rglob("attempt_*"))


@dataclass(frozen=True)
class Launch:
    """How torchrun starts ranks, or which of the ranks that are already there this process is.

    All fields but `joined` are torchrun's options. Several nodes need a rendezvous or a master address.

    Attributes:
        nproc: Processes on this node.
        joined: This process's place where it is a rank itself and torchrun starts none.
    """

    nproc: int = 1
    nnodes: int = 1
    node_rank: int | None = None
    master_addr: str | None = None
    master_port: int | None = None
    rdzv_backend: str | None = None
    rdzv_endpoint: str | None = None
    rdzv_id: str | None = None
    joined: JoinedRank | None = None

    def __post_init__(self) -> None:
        for name in ("nproc", "nnodes"):
            if getattr(self, name) < 1:
                raise UserError(f"--{name} {getattr(self, name)} must be at least 1")
            if getattr(self, name) > _MAX_PROCESSES:
                raise UserError(f"--{name} {getattr(self, name)} must be at most {_MAX_PROCESSES:,}")
        if self.nnodes == 1:
            if self.node_rank:
                raise UserError(f"--node-rank {self.node_rank} needs as many nodes; add --nnodes")
        elif self.rdzv_endpoint is None and self.master_addr is None:
            raise UserError(
                f"--nnodes {self.nnodes} needs a place to meet, the same on all nodes: --rdzv-backend c10d "
                "--rdzv-endpoint HOST:PORT, or --master-addr HOST --master-port PORT with a --node-rank for each"
            )
        elif self.rdzv_endpoint is None and self.node_rank is None:
            raise UserError("--master-addr needs a --node-rank: 0 on that node, 1, 2 … on the others")
        if self.node_rank is not None and not 0 <= self.node_rank < self.nnodes:
            raise UserError(f"--node-rank {self.node_rank} must be below --nnodes {self.nnodes}")

    def on_this_node(self, nproc: int | None) -> Launch:
        """Returns this launch with `nproc` processes here, one per GPU for None, or joined to ranks that are there.

        Raises:
            UserError: There are fewer GPUs than processes.
        """
        gpus = torch.cuda.device_count()
        joined = None if nproc or self != Launch() else JoinedRank.of(os.environ)
        if joined is not None:
            joined.variables(gpus)
            return replace(self, joined=joined)
        nproc = max(1, gpus) if nproc is None else nproc
        if 0 < gpus < nproc:
            raise UserError(
                f"--nproc {nproc} is more than the {gpus} GPUs of this machine; a GPU serves one process "
                "(CUDA_VISIBLE_DEVICES= runs them on the CPU)"
            )
        return replace(self, nproc=nproc)

    @property
    def world(self) -> int:
        return self.joined.world if self.joined else self.nproc * self.nnodes

    @property
    def nodes(self) -> int:
        return max(1, self.joined.world // self.joined.local_world) if self.joined else self.nnodes

    @property
    def leads(self) -> bool | None:
        """True where rank 0 runs under this command; None where that is not known before."""
        if self.joined:
            return self.joined.rank == 0
        return True if self.nnodes == 1 else None if self.node_rank is None else self.node_rank == 0

    def rendezvous(self, seconds: float) -> Rendezvous | None:
        """Returns where several nodes meet, with how long each waits for the others; None for one node."""
        if self.nnodes == 1:
            return None
        place = self.rdzv_endpoint or f"{self.master_addr}:{self.master_port or _PORT}"
        return Rendezvous(self.nnodes, place, seconds)

    def command(self, module: str, arguments: Sequence[str], rendezvous: Rendezvous | None = None) -> list[str]:
        """Returns the command line that runs a module in every rank, or in this one if it has joined others.

        It runs the module through `dbsp_start.rank`, so that ranks end with their torchrun. What lies in the current
        folder is not imported.
        """
        rank = module_command("dbsp_start.rank", module, *arguments)
        if self.joined:
            return [sys.executable, *rank]
        others = {key: value for key, value in vars(self).items() if key not in ("nproc", "joined")}
        options = {"nproc_per_node": self.nproc} | others
        if self.rdzv_endpoint is not None:
            options["rdzv_backend"] = self.rdzv_backend or "c10d"
        texts = [f"--{key.replace('_', '-')}={value}" for key, value in options.items() if value is not None]
        met = ["--standalone"] if self.nnodes == 1 else [rendezvous.option] if rendezvous else []
        return [sys.executable, *module_command("torch.distributed.run", *met, *texts, *rank)]
