"""Ranks of a command: those that torchrun, Slurm or MPI started, or new ones that torchrun starts here."""

from __future__ import annotations

import logging
import os
import re
import signal
import sys
import tempfile
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import torch

import dbsp_cli
from dbsp_core.utils.errors import UserError, in_short
from dbsp_core.utils.process import NOTICE, environment_number

_LAUNCHERS = (
    # rank, world size, local rank, ranks per node, nodes ("": world size / ranks per node)
    ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE"),  # torchrun
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE", "SLURM_STEP_NUM_NODES"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE", ""),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", ""),  # MPICH, Intel MPI
    ("PALS_RANKID", "PMI_SIZE", "PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE", ""),  # Cray
    ("PMI_RANK", "PMI_SIZE", "PMI_LOCAL_RANK", "PMI_LOCAL_SIZE", ""),  # Cray
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE", ""),
    ("FLUX_TASK_RANK", "FLUX_JOB_SIZE", "FLUX_TASK_LOCAL_ID", "", "FLUX_JOB_NNODES"),
)
_PORT = 29500  # torchrun's default
_PROGRAM = Path(dbsp_cli.__file__).with_name("__main__.py")
ENDING = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
"""Signals that end the command."""


@dataclass(frozen=True)
class RankInfo:
    """This process's rank in a run."""

    rank: int = 0
    world: int = 1
    local: int = 0  # On this node, of `local_world`
    local_world: int = 1
    nodes: int = 1  # The same on all ranks
    address: str = "127.0.0.1"  # Of rank 0, where ranks meet
    port: int = 0  # 0: any free port, for a single rank

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> RankInfo | None:
        """Reads the variables of a launcher, or returns None if they name fewer than two ranks."""
        incomplete = None
        for *names, per_node, nodes in _LAUNCHERS:
            rank, world, local = (environment_number(name, environment) for name in names)
            if rank is None or world is None or local is None:
                if world != 1 and environment.get(names[0]) and environment.get(names[1]):
                    incomplete = incomplete or names
                continue
            if world < 2:
                continue
            counts = re.match(r"([1-9]\d{0,8})(\(x\d+\))?(,)?", environment.get(per_node, ""))  # Slurm: "2(x3),1"
            local_world = local + 1 if counts and counts[3] else int(counts[1]) if counts else world
            node_count = environment_number(nodes, environment) or max(1, world // local_world)
            address = environment.get("MASTER_ADDR") or ("127.0.0.1" if node_count == 1 else "")
            if not address:
                raise UserError(
                    "ranks were started on several nodes, but MASTER_ADDR is not set; set MASTER_ADDR to rank "
                    '0\'s host, with Slurm: export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | '
                    "head -n 1)"
                )
            port = environment_number("MASTER_PORT", environment) if environment.get("MASTER_PORT") else _PORT
            if port is None or not 0 < port < 65536:
                raise UserError(f"MASTER_PORT must be 1 to 65535, got {in_short(environment['MASTER_PORT'])}")
            return cls(rank, world, local, local_world, node_count, address, port)
        if incomplete is None:
            return None
        values = ", ".join(f"{name}={in_short(environment[name])}" for name in incomplete if name in environment)
        lacking = next(name for name in incomplete if environment_number(name, environment) is None)
        raise UserError(
            f"{values} say that there are several ranks, but {lacking} is missing or not a number; start the command "
            f"with torchrun, or set {lacking} (and LOCAL_WORLD_SIZE, with RANK), or unset {incomplete[0]} and "
            f"{incomplete[1]} to run on this machine alone"
        )

    def export(self) -> None:
        """Sets the environment variables that torch.distributed and `use_local_device` read."""
        os.environ |= {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world),
            "LOCAL_RANK": str(self.local),
            "LOCAL_WORLD_SIZE": str(self.local_world),
            "MASTER_ADDR": self.address,
            "MASTER_PORT": str(self.port),
        }


def processes_here(requested: int | None) -> int:
    """Returns how many ranks to start: `requested` (at most one for each GPU), or one for each GPU, or one."""
    gpus = torch.cuda.device_count()
    count = max(1, gpus) if requested is None else requested
    if 0 < gpus < count:
        raise UserError(
            f"--nproc {count} exceeds the {gpus} GPUs of this machine, each of which runs one process; lower --nproc, "
            "or set CUDA_VISIBLE_DEVICES= to run on the CPU"
        )
    return count


@contextmanager
def ending_in_order() -> Iterator[None]:
    """Raises SystemExit on signals that end this process, so that no half-written file remains."""

    def end(number: int, _: object) -> NoReturn:
        raise SystemExit(128 + number)

    before = {number: signal.getsignal(number) for number in ENDING}
    for number in ENDING:
        if before[number] is not signal.SIG_IGN:
            signal.signal(number, end)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run_ranks(count: int, arguments: Sequence[str]) -> int:
    """Runs `dbsp ARGUMENTS` in several ranks with torchrun; returns the exit code: 0, or a failed rank's."""
    from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # ranks print their own errors
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // count)))
    with ending_in_order(), tempfile.TemporaryDirectory(prefix="dbsp-ranks-") as folder:
        os.environ["TMPDIR"] = folder  # for ranks, which may be killed before they delete their files
        launch = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=count,
            run_id=str(uuid.uuid4()),
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",  # any free port
            max_restarts=0,
            logs_specs=DefaultLogsSpecs(log_dir=folder),
        )
        if hasattr(launch, "signals_to_handle"):  # newer torch; nohup ignores SIGHUP
            heard = [number.name for number in ENDING if signal.getsignal(number) is not signal.SIG_IGN]
            launch.signals_to_handle = ",".join(heard)
        try:
            elastic_launch(launch, sys.executable)("-u", str(_PROGRAM), *arguments)
        except ChildFailedError as failed:
            return _explain({rank: failure.exitcode for rank, failure in failed.failures.items()})
        except SignalException as ended:
            return 128 + int(ended.sigval)
    return 0


def _explain(codes: Mapping[int, int]) -> int:
    """Names the rank that failed first if a signal killed it; returns the command's exit code.

    torchrun ends the other ranks with SIGTERM, and ranks that lose the connection to a killed rank fail.
    """
    rank = min(codes, key=lambda rank: (codes[rank] == -signal.SIGTERM, codes[rank] > 0, rank))
    code = codes[rank]
    if code < 0:
        memory = "; out of memory? see dmesg" if code == -signal.SIGKILL else ""
        print(f"{NOTICE}rank {rank} was killed by signal {-code}{memory}", file=sys.stderr)
    return code if code > 0 else 1
