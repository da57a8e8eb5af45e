"""The ranks of a command: joined where torchrun, Slurm or MPI has started them, else started here by torchrun."""

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
from typing import Any, NoReturn

import torch

import dbsp_cli
from dbsp_core.comm.groups import BROKE_OFF
from dbsp_core.utils.errors import UserError, in_short
from dbsp_core.utils.process import ERROR, NOTICE, environment_number, printable

_LAUNCHERS = (
    ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE"),  # torchrun
    (  # of srun, not of sbatch
        *("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
        *("SLURM_STEP_TASKS_PER_NODE", "SLURM_STEP_NUM_NODES"),
    ),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE", ""),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", ""),  # MPICH, Intel MPI
    ("PALS_RANKID", "PMI_SIZE", "PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE", ""),  # Cray
    ("PMI_RANK", "PMI_SIZE", "PMI_LOCAL_RANK", "PMI_LOCAL_SIZE", ""),  # Cray
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE", ""),
    ("FLUX_TASK_RANK", "FLUX_JOB_SIZE", "FLUX_TASK_LOCAL_ID", "", "FLUX_JOB_NNODES"),
)
"""Variables that say rank, ranks, rank on this node, ranks on each node, and, if the launcher has it, nodes."""
_PORT = 29500  # torchrun's default
_PROGRAM = Path(dbsp_cli.__file__).with_name("__main__.py")
_TAIL = 30  # lines
_USER_ERROR = 2  # exit code
ENDING = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
"""Signals that end the command."""


@dataclass(frozen=True)
class RankInfo:
    """This process's rank in a run, one process each.

    Attributes:
        local: Rank on this node.
        local_world: Number of ranks on this node.
        nodes: Number of nodes, the same on all ranks.
        address: Host name of rank 0, where ranks meet at `port`; any free port for 0, of one rank alone.
    """

    rank: int = 0
    world: int = 1
    local: int = 0
    local_world: int = 1
    nodes: int = 1
    address: str = "127.0.0.1"
    port: int = 0

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> RankInfo | None:
        """Returns what the environment says, or None if it names no other rank.

        Raises:
            UserError: A variable that ranks need is missing or no number, nothing says where ranks of several nodes
                meet, or MASTER_PORT is no port.
        """
        incomplete = None
        for *names, local_world, nodes in _LAUNCHERS:
            rank, world, local = (environment_number(name, environment) for name in names)
            if rank is not None and world is not None and local is not None:
                if world < 2:
                    continue
                node = environment_number("SLURM_NODEID", environment) or 0
                on_this_node = _ranks_on(node, environment.get(local_world, "")) or world
                everywhere = environment_number(nodes, environment) or max(1, world // on_this_node)
                address = environment.get("MASTER_ADDR") or _address(environment, on_this_node == world)
                return cls(rank, world, local, on_this_node, everywhere, address, _port(environment))
            if environment.get(names[0]) and environment.get(names[1]) and world != 1:
                incomplete = incomplete or names
        if incomplete is not None:
            raise _incomplete(incomplete, environment)
        return None

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


def _incomplete(names: Sequence[str], environment: Mapping[str, str]) -> UserError:
    """Returns the error for a launcher that names other ranks, without all that a rank must know."""
    given = ", ".join(f"{name}={in_short(environment[name])}" for name in names if environment.get(name))
    lacking = next(name for name in names if environment_number(name, environment) is None)
    wrong = "is not a number" if environment.get(lacking) else "is missing"
    return UserError(
        f"{given} name one of several ranks, but {lacking} {wrong}; start the command by torchrun, or set {lacking} "
        f"(and LOCAL_WORLD_SIZE, with RANK), or unset {names[0]} and {names[1]} for a run of this machine alone"
    )


def _ranks_on(node: int, given: str) -> int | None:
    """Returns how many ranks a node has, by a number for all nodes, or by Slurm's "2(x3),1" for each."""
    counts = re.findall(r"([1-9]\d{0,8})(?:\(x(\d{1,9})\))?", given)
    for count, nodes in counts:
        node -= int(nodes or 1)
        if node < 0:
            return int(count)
    return int(counts[0][0]) if counts else None


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
    """Returns the host name of rank 0's node."""
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST")
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodes or "")
    if first:  # such as "rack[1-2]n[07-09,12],login": the first of each pair of brackets
        return re.sub(r"\[([^,\-\]]*)[^\]]*\]", r"\1", first[0])
    if one_node:
        return "127.0.0.1"
    raise UserError(
        "ranks were started on several nodes, and nothing says where they meet; set MASTER_ADDR to rank 0's"
    )


def processes_here(given: int | None) -> int:
    """Returns how many ranks to start: as many as given, or one for each GPU, or one.

    Raises:
        UserError: There are fewer GPUs than that.
    """
    gpus = torch.cuda.device_count()
    count = max(1, gpus) if given is None else given
    if 0 < gpus < count:
        raise UserError(
            f"--nproc {count} is more than the {gpus} GPUs of this computer; a GPU runs one process "
            "(CUDA_VISIBLE_DEVICES= runs them on the CPU)"
        )
    return count


@contextmanager
def ending_in_order() -> Iterator[None]:
    """Lets signals that end this process raise SystemExit, so that nothing half-written is left."""

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
    """Runs `dbsp ARGUMENTS` in two ranks or more by torchrun, and returns the exit code: 0, or a failed rank's.

    Rank 0 has the terminal. What the others say is kept in files, whose ends are shown where one fails.
    """
    from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException, Std
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # failures are reported below
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // count)))
    with ending_in_order(), tempfile.TemporaryDirectory(prefix="dbsp-ranks-") as logs:
        os.environ["TMPDIR"] = logs  # for ranks, which may be ended before they have tidied up
        launch = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=count,
            run_id=str(uuid.uuid4()),
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",  # any free port
            max_restarts=0,
            logs_specs=DefaultLogsSpecs(log_dir=logs, redirects=dict.fromkeys(range(1, count), Std.ALL)),
        )
        if hasattr(launch, "signals_to_handle"):  # of newer torch; nohup has SIGHUP ignored
            heard = [one.name for one in ENDING if signal.getsignal(one) is not signal.SIG_IGN]
            launch.signals_to_handle = ",".join(heard)
        try:
            elastic_launch(launch, sys.executable)("-u", str(_PROGRAM), *arguments)
        except ChildFailedError as failed:
            return _explain(failed.failures, Path(logs))
        except SignalException as ended:
            return 128 + int(ended.sigval)
    return 0


def _explain(failures: Mapping[int, Any], logs: Path) -> int:
    """Says which rank failed first, and how, unless it is rank 0 and has said so itself; returns the exit code."""
    said = {rank: _output_of(logs, rank) for rank in failures}

    def is_consequence(rank: int) -> bool:
        return failures[rank].exitcode == -signal.SIGTERM or any(BROKE_OFF in line for line in said[rank])

    rank = min(failures, key=lambda rank: (is_consequence(rank), rank == 0, rank))
    code = failures[rank].exitcode
    errors = [line for line in said[rank] if line.startswith(ERROR)]
    if code == _USER_ERROR and 0 in failures and failures[0].exitcode == code:
        return _USER_ERROR  # of all ranks, and rank 0 has shown it
    if code == _USER_ERROR and errors:
        print(errors[-1], file=sys.stderr)
    elif rank or code < 0:
        killed = ": killed; out of memory? see dmesg" if code == -signal.SIGKILL else ""
        ends = ["; the end of its output:", *said[rank]] if said[rank] else [""]
        print(f"{NOTICE}rank {rank} failed (exit code {code}{killed}){ends[0]}", *ends[1:], sep="\n", file=sys.stderr)
    return code if code > 0 else 1


def _output_of(logs: Path, rank: int) -> list[str]:
    """Returns the last lines that a rank has left in a file; of rank 0 there is none."""
    lines: list[str] = []
    for name in ("stdout.log", "stderr.log"):
        for path in logs.glob(f"*/attempt_*/{rank}/{name}"):
            lines += printable(path.read_text(encoding="utf-8", errors="replace")).splitlines()[-_TAIL:]
    return lines[-_TAIL:]
