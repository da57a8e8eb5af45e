"""The ranks that share one sequence.

One process group carries every UxRy: the exchange spans all P ranks whatever the strategy, and a ring's neighbours are
peers within the same group. So there is nothing to build when the strategy changes, and x·y may be any product.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from dbsp_core.comm.auxiliary import auxiliary_group, timeout_of
from dbsp_core.utils.errors import UserError

__all__ = [
    "BROKE_OFF",
    "CommunicationError",
    "PendingTransfer",
    "SequenceGroup",
    "barrier",
    "gather_shards",
    "report_group",
    "told_if_it_breaks_off",
]

# Its name before torch 2.13 is the longer one.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
BROKE_OFF = "communication between the ranks of the sequence broke off"
"""How the words of a rank begin that has missed another."""
_DESTROYED = (
    "the process group that this was made for is destroyed; make new executors and sessions for another one, on a "
    "pipeline by disable and enable"
)
_OUTSIDE = "this rank is outside the process group that it was given; call db-SP on the group's ranks only"


class CommunicationError(RuntimeError):
    """Another rank has gone, or was too late. Nothing more can be sent between the ranks of the group."""


@contextmanager
def told_if_it_breaks_off() -> Iterator[None]:
    """Says in plain words what a broken connection means; the process group's own words stand behind."""
    try:
        yield
    except RuntimeError as error:
        raise CommunicationError(
            f"{BROKE_OFF}: one of the other ranks may have died, or was too late; look for the first error in its "
            f"output, and restart all ranks ({' '.join(str(error).split())})"
        ) from error


@dataclass(frozen=True)
class PendingTransfer:
    """A tensor in flight from other ranks; `wait` returns it. Keeps what is being sent alive until then."""

    received: torch.Tensor
    sent: torch.Tensor
    works: tuple[dist.Work, ...]

    def wait(self) -> torch.Tensor:
        with told_if_it_breaks_off():
            for work in self.works:
                work.wait()
        return self.received


@dataclass(frozen=True, init=False)
class SequenceGroup:
    """`rank` of `size` in a process group; without one, a single process that is alone.

    torch keeps the process group until it is destroyed; this does not. An executor, or a loss with its graph, may be
    there for longer, and a group that is left when Python ends may abort it.
    """

    rank: int
    size: int
    _held_by_torch: weakref.ref[dist.ProcessGroup] | None

    def __init__(self, rank: int, size: int, group: dist.ProcessGroup | None = None) -> None:
        for name, value in (
            ("rank", rank),
            ("size", size),
            ("_held_by_torch", None if group is None else weakref.ref(group)),
        ):
            object.__setattr__(self, name, value)

    @classmethod
    def of(cls, group: dist.ProcessGroup | SequenceGroup | None = None) -> SequenceGroup:
        """The given group, or the default one; a single process where torch.distributed is not initialised.

        Raises UserError in one of several processes without torch.distributed, where each would do all of the work by
        itself, and on a rank outside the group.
        """
        if isinstance(group, SequenceGroup):
            return group
        if not dist.is_available() or not dist.is_initialized():
            _require_alone()
            return cls(0, 1)
        if group == dist.GroupMember.NON_GROUP_MEMBER:  # what new_group gives such a rank
            raise UserError(_OUTSIDE)
        group = group or dist.group.WORLD
        if group is None:
            return cls(0, 1)
        return cls(dist.get_rank(group), dist.get_world_size(group), group)

    @property
    def alone(self) -> bool:
        """Whether there is no process group: this rank decides by itself."""
        return self._held_by_torch is None

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The process group; not to be kept. Raises UserError once it is destroyed."""
        if self._held_by_torch is None:
            return None
        group = self._held_by_torch()
        if group is None:
            raise UserError(_DESTROYED)
        return group

    @property
    def timeout(self) -> timedelta | None:
        """After which its collectives fail; None where that is not known."""
        group = self.group
        return None if group is None else timeout_of(group)

    def control(self) -> SequenceGroup:
        """The same ranks in a gloo group of their own, for what the calling thread must agree on with CPU tensors.

        Collective at the first call.
        """
        return self.beside("control")

    def beside(self, purpose: str) -> SequenceGroup:
        """The same ranks in a gloo group of their own, one for each purpose: its collectives meet no others.

        It has this group's timeout, and goes with it. Collective at the first call.
        """
        group = self.group
        if group is None:
            return self
        with told_if_it_breaks_off():
            return SequenceGroup(self.rank, self.size, auxiliary_group(group, purpose))

    def all_to_all(
        self, sent: torch.Tensor, receive_splits: Sequence[int], send_splits: Sequence[int]
    ) -> torch.Tensor:
        """Uneven all-to-all along dim 0. returns: [Σ receive_splits, ...], by source rank."""
        return self.start_all_to_all(sent, receive_splits, send_splits, asynchronous=False).wait()

    def start_all_to_all(
        self,
        sent: torch.Tensor,
        receive_splits: Sequence[int],
        send_splits: Sequence[int],
        *,
        asynchronous: bool = True,
    ) -> PendingTransfer:
        """`all_to_all`, to be waited for later, unless it is not asynchronous: then it is done."""
        if self.size == 1:
            return PendingTransfer(sent, sent, ())
        received = sent.new_empty(sum(receive_splits), *sent.shape[1:])
        splits = list(receive_splits), list(send_splits)
        with told_if_it_breaks_off():
            work = dist.all_to_all_single(received, sent, *splits, group=self.group, async_op=asynchronous)
        return PendingTransfer(received, sent, (work,) if asynchronous else ())

    def shift(self, sent: torch.Tensor, to: int, received_shape: Sequence[int], source: int) -> PendingTransfer:
        """Starts to send a tensor to rank `to` and to receive one of another shape from rank `source`."""
        received = sent.new_empty(tuple(received_shape))
        group = self.group
        if group is None:
            raise RuntimeError("a single process has no ring to shift along")
        operations = []
        if sent.numel():
            operations.append(dist.P2POp(dist.isend, sent, dist.get_global_rank(group, to), group))
        if received.numel():
            operations.append(dist.P2POp(dist.irecv, received, dist.get_global_rank(group, source), group))
        with told_if_it_breaks_off():
            works = dist.batch_isend_irecv(operations) if operations else []
        return PendingTransfer(received, sent, tuple(works))

    def all_gather(self, mine: torch.Tensor) -> list[torch.Tensor]:
        """Every rank's tensor, by rank; all of one shape."""
        if self.size == 1:
            return [mine]
        mine = mine.contiguous()
        everyone = [torch.empty_like(mine) for _ in range(self.size)]
        with told_if_it_breaks_off():
            dist.all_gather(everyone, mine, group=self.group)
        return everyone

    def all_gather_along(self, mine: torch.Tensor) -> torch.Tensor:
        """Every rank's tensor, contiguous and of one shape, one after the other along dim 0, by rank."""
        if self.size == 1:
            return mine
        everyone = mine.new_empty(self.size * len(mine), *mine.shape[1:])
        with told_if_it_breaks_off():
            _all_gather_single(everyone, mine, group=self.group)
        return everyone

    def gather_integers(self, values: Sequence[int], device: torch.device) -> list[list[int]]:
        """Every rank's integers (below 2^63), by rank: for checks that all ranks must decide alike."""
        mine = torch.tensor(values, dtype=torch.int64, device=device)
        return [rank_values.tolist() for rank_values in self.all_gather(mine)]


def _require_alone() -> None:
    world = os.environ.get("WORLD_SIZE", "")
    if "RANK" in os.environ and world.isdecimal() and int(world) > 1:
        raise UserError(
            f"torchrun started {world} processes, but torch.distributed is not initialised; call "
            "torch.distributed.init_process_group() first (or unset WORLD_SIZE, for one process alone)"
        )


def report_group(group: SequenceGroup) -> SequenceGroup:
    """The ranks in a gloo group of their own, which nothing else uses. Collective at the first call.

    What becomes of it when a rank does not come disturbs no attention. Ranks wait for one another as long as the
    group's own timeout says.
    """
    return group.beside("meeting")


def barrier(group: SequenceGroup) -> None:
    """Returns once all ranks of a meeting group have called it. Raises RuntimeError where one does not in time."""
    if group.alone:
        return
    try:
        dist.monitored_barrier(group.group, group.timeout)
    except RuntimeError as error:
        limit = "the time limit" if group.timeout is None else f"{group.timeout.total_seconds():g} s"
        raise RuntimeError(
            f"not all ranks came within {limit}; the run may have failed on one ({' '.join(str(error).split())})"
        ) from error


def gather_shards(shard: torch.Tensor, dim: int, group: SequenceGroup) -> torch.Tensor:
    """Every rank's shard, by rank, along `dim`; all of one shape. Collective.

    Backward gives each rank its own shard's part and sends nothing: every rank computes the whole loss from the whole
    output. What a rank's parameters then have for gradients is their part of a sum over the group.
    """
    if group.size == 1:
        return shard
    gathered: torch.Tensor = _Gather.apply(shard, dim % shard.ndim, group)
    return gathered


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, shard: torch.Tensor, dim: int, group: SequenceGroup) -> torch.Tensor:
        ctx.dim, ctx.first, ctx.size = dim, group.rank * shard.shape[dim], shard.shape[dim]
        return torch.cat(group.all_gather(shard), dim=dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return gradient.narrow(ctx.dim, ctx.first, ctx.size), None, None
