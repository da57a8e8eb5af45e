"""Timing of ranks: on GPUs by the clock, on a CPU alternately, by what each of them computes."""

from __future__ import annotations

import fcntl
import os
import pickle
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing.spawn import ProcessException, start_processes

from dbsp_core import SequenceGroup
from dbsp_core.comm.groups import PendingTransfer
from dbsp_core.comm.process_groups import meet
from dbsp_diffusers.rank_program import process_group, use_local_device


def gpu_seconds(action: Callable[[], object]) -> float:
    """Returns the wall time of an action that all ranks begin together, its GPU's work included."""
    torch.cuda.synchronize()
    meet()
    start = time.perf_counter()
    action()
    torch.cuda.synchronize()
    return time.perf_counter() - start


class Turns:
    """One process of a machine computes at a time: whoever has locked a file.

    Two cores of a virtual machine may be two threads of one, on which a rank computes twice as fast once its neighbour
    has finished. Wall time then says nothing of balance; seconds that each rank computes alone do.
    """

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_CREAT | os.O_RDWR)
        self._mine = False

    def core_seconds(self, action: Callable[[], object]) -> float:
        """Returns the seconds that this process computes in an action, in its turns.

        In the action, ranks may wait for each other in a `TurnTakingGroup`'s all-to-all only.
        """
        self._take()
        try:
            start = time.process_time()
            action()
            return time.process_time() - start
        finally:
            self._leave()

    @contextmanager
    def left(self) -> Iterator[None]:
        """Leaves this process's turn, if it has one, to another within the block."""
        mine = self._mine
        if mine:
            self._leave()
        try:
            yield
        finally:
            if mine:
                self._take()

    def _take(self) -> None:
        fcntl.flock(self._file, fcntl.LOCK_EX)
        self._mine = True

    def _leave(self) -> None:
        self._mine = False
        fcntl.flock(self._file, fcntl.LOCK_UN)


@dataclass(frozen=True)
class TurnTakingGroup(SequenceGroup):
    """A group whose ranks leave their turn while they wait in an all-to-all."""

    turns: Turns = field(kw_only=True)

    @classmethod
    def of_all(cls, turns: Turns) -> TurnTakingGroup:
        """All ranks of this program."""
        ranks = SequenceGroup.from_group()
        return cls(ranks.rank, ranks.size, ranks._held_by_torch, turns=turns)

    def start_all_to_all(
        self, sent: torch.Tensor, receive_splits: Sequence[int], send_splits: Sequence[int]
    ) -> PendingTransfer:
        """Starts an all-to-all."""
        transfer = super().start_all_to_all(sent, receive_splits, send_splits)
        return _Transfer(transfer.received, transfer.sent, transfer.works, turns=self.turns)


@dataclass
class _Transfer(PendingTransfer):
    turns: Turns = field(kw_only=True)

    def wait(self) -> torch.Tensor:
        with self.turns.left():
            return super().wait()


_CPU_RANKS = {"OMP_NUM_THREADS": "1", "MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(16 << 30)}
"""Environment of ranks on a CPU: one core each; and glibc keeps freed memory, as GPU allocators do, instead of handing
large blocks back to the system, after which every call would pay for fresh pages."""


def run_ranks(function: Callable[..., Any], world: int, device: str, *args: Any) -> list[Any]:
    """Calls function(rank, world, *args) in `world` new processes of one process group.

    Args:
        function: Importable by its name.
        device: "cpu" (gloo, one thread a rank) or "cuda" (NCCL, one GPU a rank).

    Returns:
        The results by rank.

    Raises:
        RuntimeError: A rank failed or died; the message has its trace.
    """
    before = dict(os.environ)
    with tempfile.TemporaryDirectory() as folder:
        os.environ.update(_CPU_RANKS if device == "cpu" else {})  # for the new processes
        try:
            start_processes(
                _run_rank, (function, world, device, folder, args), nprocs=world, daemon=True, start_method="spawn"
            )
        except ProcessException as error:
            raise RuntimeError(f"rank {error.error_index} ended before it answered: {error}") from error
        finally:
            os.environ.clear()
            os.environ.update(before)
        return [pickle.loads(Path(folder, f"rank{rank}").read_bytes()) for rank in range(world)]


def _run_rank(rank: int, function: Callable[..., Any], world: int, device: str, folder: str, args: tuple) -> None:
    if device == "cpu":
        torch.set_num_threads(1)
    store = Path(folder, "store").as_posix()
    own = use_local_device(rank) if device == "cuda" else torch.device("cpu")
    with process_group(own, init_method=f"file://{store}", rank=rank, world_size=world):
        Path(folder, f"rank{rank}").write_bytes(pickle.dumps(function(rank, world, *args)))
        with suppress(RuntimeError):  # a rank that failed says so itself
            meet()
