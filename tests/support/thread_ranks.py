"""Ranks that are threads of this process, with the interface of `WorkerPool`: for arithmetic and order, not transport.

Threads cost nothing to start, and share what is slow to make, such as a reference. They share everything else, too:
what the product keeps for the whole process, such as an `lru_cache`, would hide a rank's fault from the others, and a
patch that a rank makes holds for all. Cases on processes (`WorkerPool`) cover the former; the latter are made outside.
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar
from unittest import mock

import torch
import torch.distributed as dist

from dbsp_core import SequenceGroup
from tests.support.thread_group import Meeting, Member, ThreadGroup
from tests.support.workers import SAFETY_NET_S, WorkerError, values_of

Result = TypeVar("Result")


@dataclass(frozen=True)
class ThreadRanks:
    """`world` threads in one group. patience_s: after which a rank that has not come never will"""

    world: int
    patience_s: float = SAFETY_NET_S

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Calls function(rank, world, *args) on every rank. Returns its results by rank. Raises WorkerError.

        In it, `SequenceGroup.from_group()` is the rank's group. A rank that raises releases those that wait for it,
        with a CommunicationError. Raises also where ranks have not made the same number of calls.
        """
        meeting = Meeting(self.world, self.patience_s)
        answers: list[Any] = [(False, "Hang", f"no answer from rank {rank}", "") for rank in range(self.world)]

        def run_rank(rank: int) -> None:
            torch.set_num_threads(1)
            _HERE.member = Member(rank, meeting)
            try:
                answers[rank] = (True, "", "", function(rank, self.world, *args))
                meeting.leave(rank, f"rank {rank} has ended")
            except BaseException as error:
                answers[rank] = (False, type(error).__name__, str(error), traceback.format_exc())
                meeting.leave(rank, f"rank {rank} has failed")

        ranks = [threading.Thread(target=run_rank, args=(rank,), daemon=True) for rank in range(self.world)]
        with mock.patch.object(SequenceGroup, "from_group", classmethod(_from_group)):
            for thread in ranks:
                thread.start()
            for thread in ranks:
                thread.join(SAFETY_NET_S)
        values = values_of(answers)
        if len(set(meeting.made)) > 1:
            raise WorkerError([(rank, "Unequal", f"{made} calls") for rank, made in enumerate(meeting.made)], "")
        return values


_HERE = threading.local()
_of_processes = SequenceGroup.from_group.__func__  # type: ignore[attr-defined]


def once(make: Callable[[], Result]) -> Result:
    """Returns what `make` does, which ranks that are threads call once for all of them: they must ask in one order."""
    member = getattr(_HERE, "member", None)
    made: Result = make() if member is None else member.take(make)
    return made


def _from_group(
    cls: type[SequenceGroup], group: dist.ProcessGroup | SequenceGroup | Member | None = None
) -> SequenceGroup | ThreadGroup:
    if isinstance(group, Member):
        return group.group()
    member = getattr(_HERE, "member", None)
    if group is None and member is not None:
        return member.group()
    return _of_processes(cls, group)
