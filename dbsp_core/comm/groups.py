"""The ranks that share one sequence.

One process group carries every UxRy: the exchange spans all P ranks for any strategy, and a ring's neighbours are
peers within the same group. So there is nothing to build when the strategy changes, and x·y may be any product.
"""

from __future__ import annotations

import os
import socket
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from dbsp_core.comm.process_groups import CONTROL, over_nccl, subgroup, timeout_of
from dbsp_core.utils.errors import UserError, fingerprint_of
from dbsp_core.utils.process import environment_number

# Its name before torch 2.13 is the longer one.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
BROKE_OFF = "communication between the ranks of the sequence broke off"
"""Beginning of the message of a rank that has lost another."""
_DESTROYED = (
    "the process group that this was made for is destroyed; make new attentions and sessions for another one, on a "
    "pipeline by disable and enable"
)
_OUTSIDE = "this rank is outside the process group that it was given; call db-SP on the group's ranks only"


class CommunicationError(RuntimeError):
    """Another rank has ended or was too late. Nothing more can be sent within the group."""


class explain_broken_connection:  # a generator would cost every collective 2 µs more
    """Explains a broken connection inside as a `CommunicationError`, which quotes the process group's message."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, RuntimeError):
            raise CommunicationError(
                f"{BROKE_OFF}: one of the other ranks may have died, or was too late; look for the first error in its "
                f"output, and restart all ranks ({' '.join(str(error).split())})"
            ) from error


@dataclass
class PendingTransfer:
    """A tensor in flight from other ranks, which `wait` returns. Keeps the tensor being sent alive until then."""

    received: torch.Tensor
    sent: torch.Tensor
    works: tuple[dist.Work, ...]

    def wait(self) -> torch.Tensor:
        with explain_broken_connection():
            for work in self.works:
                work.wait()
        return self.received


@dataclass(frozen=True)
class SequenceGroup:
    """`rank` of `size` in a process group, or a single process without a group.

    torch holds the process group until it is destroyed; this has only a weak reference. Attentions and graphs of
    losses may live longer, and a group that is left when Python ends may abort it.
    """

    rank: int
    size: int
    _held_by_torch: weakref.ref[dist.ProcessGroup] | None = None

    @classmethod
    def from_group(cls, group: dist.ProcessGroup | SequenceGroup | None = None) -> SequenceGroup:
        """Returns the given group, or the default one; a single process if torch.distributed is not initialised.

        Raises:
            UserError: In one of several processes without torch.distributed, each of which would do all of the work;
                and on a rank outside the group.
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
        return cls(dist.get_rank(group), dist.get_world_size(group), weakref.ref(group))

    @property
    def alone(self) -> bool:
        """True without torch.distributed (a single process)."""
        return self._held_by_torch is None

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The process group, to be used and not kept. Raises UserError once it is destroyed."""
        if self._held_by_torch is None:
            return None
        group = self._held_by_torch()
        if group is None:
            raise UserError(_DESTROYED)
        return group

    @property
    def timeout(self) -> timedelta | None:
        """Time after which its collectives fail; None where it is not known."""
        group = self.group
        return None if group is None else timeout_of(group)

    @property
    def over_nccl(self) -> bool:
        """True if NCCL carries the ranks' tensors on GPUs."""
        group = self.group
        return group is not None and over_nccl(group)

    def control(self) -> SequenceGroup:
        """Returns the `auxiliary` group in which the calling thread compares things, with CPU tensors."""
        return self.auxiliary(CONTROL)

    def for_host_tensors(self) -> SequenceGroup:
        """Returns a group of the same ranks that exchanges CPU tensors: this one, or `control` in addition to NCCL.

        Ranks compare values on the host, for any device of q, k and v: it must not wait for that device, and a
        rank that was given tensors on another device than the others must be able to say so.
        """
        return self.control() if self.over_nccl else self

    def auxiliary(self, purpose: str) -> SequenceGroup:
        """Returns the same ranks in an auxiliary gloo group for one purpose, whose collectives mix with no others.

        It has this group's timeout and is destroyed with it. Collective at the first call.
        """
        group = self.group
        if group is None:
            return self
        with explain_broken_connection():
            return self._made(group, purpose, range(self.size), "gloo")

    def part(self, first: int, size: int) -> SequenceGroup:
        """Returns the ranks from `first` on, this one among them, in a group of their own on the same backend.

        It has this group's timeout and is destroyed with it. Collective for its ranks at the first call. One rank
        alone needs no group, and all have this one.
        """
        group = self.group
        if size == self.size:
            return self
        if group is None or size == 1:
            return SequenceGroup(0, 1)
        with explain_broken_connection():
            ranks = range(first, first + size)
            return self._made(group, f"ranks {first} to {ranks[-1]}", ranks, dist.get_backend(group))

    def _made(self, group: dist.ProcessGroup, purpose: str, ranks: range, backend: str) -> SequenceGroup:
        made = subgroup(group, purpose, ranks, backend)
        return SequenceGroup(self.rank - ranks.start, len(ranks), weakref.ref(made))

    def all_to_all(
        self, sent: torch.Tensor, receive_splits: Sequence[int], send_splits: Sequence[int]
    ) -> torch.Tensor:
        """Runs an all-to-all of any splits along dim 0; returns [Σ receive_splits, ...], by source rank."""
        return self.start_all_to_all(sent, receive_splits, send_splits).wait()

    def start_all_to_all(
        self, sent: torch.Tensor, receive_splits: Sequence[int], send_splits: Sequence[int]
    ) -> PendingTransfer:
        """Starts an `all_to_all`."""
        if self.size == 1:
            return PendingTransfer(sent, sent, ())
        received = sent.new_empty(sum(receive_splits), *sent.shape[1:])
        splits = list(receive_splits), list(send_splits)
        with explain_broken_connection():
            work = dist.all_to_all_single(received, sent, *splits, group=self.group, async_op=True)
        return PendingTransfer(received, sent, (work,))

    def all_gather(self, mine: torch.Tensor) -> list[torch.Tensor]:
        """Returns every rank's tensor, by rank; all have one shape."""
        if self.size == 1:
            return [mine]
        mine = mine.contiguous()
        gathered = [torch.empty_like(mine) for _ in range(self.size)]
        with explain_broken_connection():
            dist.all_gather(gathered, mine, group=self.group)
        return gathered

    def all_gather_along(self, mine: torch.Tensor) -> torch.Tensor:
        """Returns every rank's contiguous tensor, concatenated along dim 0 by rank; all have one shape."""
        if self.size == 1:
            return mine
        gathered = mine.new_empty(self.size * len(mine), *mine.shape[1:])
        with explain_broken_connection():
            _all_gather_single(gathered, mine, group=self.group)
        return gathered

    def broadcast(self, values: torch.Tensor) -> None:
        """Writes the first rank's contiguous tensor into every rank's, of one shape and dtype."""
        group = self.group
        if group is None or self.size == 1:
            return
        with explain_broken_connection():
            dist.broadcast(values, dist.get_global_rank(group, 0), group=group)

    def gather_integers(self, values: Sequence[int]) -> list[list[int]]:
        """Returns every rank's integers (below 2^63), by rank, sent from host to host."""
        mine = torch.tensor(values, dtype=torch.int64, device="cpu")
        return [rank_values.tolist() for rank_values in self.for_host_tensors().all_gather(mine)]

    def barrier(self) -> None:
        """Returns once all ranks of a gloo group have called it. Raises RuntimeError where one does not in time."""
        if self.alone:
            return
        try:
            dist.monitored_barrier(self.group, self.timeout)
        except RuntimeError as error:
            limit = "the time limit" if self.timeout is None else f"{self.timeout.total_seconds():g} s"
            raise RuntimeError(
                f"not all ranks came within {limit}; the run may have failed on one ({' '.join(str(error).split())})"
            ) from error


def _require_alone() -> None:
    world = environment_number("WORLD_SIZE") or 1
    if "RANK" in os.environ and world > 1:
        raise UserError(
            f"torchrun started {world} processes, but torch.distributed is not initialised; call "
            "torch.distributed.init_process_group() first (or unset WORLD_SIZE, for one process alone)"
        )


def gather_shards(shard: torch.Tensor, dim: int, group: SequenceGroup) -> torch.Tensor:
    """Concatenates every rank's shard, by rank, along `dim`; all have one shape. Collective and differentiable.

    Backward gives each rank the gradient of its own shard and sends nothing, as every rank computes the whole loss.
    The gradients of a rank's parameters are then its part of a sum over the group.
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


def node_fingerprints() -> list[int]:
    """Returns three numbers from which `number_nodes` infers this rank's node."""
    return [_number("GROUP_RANK", 0), _number("LOCAL_WORLD_SIZE", 1), fingerprint_of(socket.gethostname())]


def number_nodes(group: SequenceGroup, fingerprints: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Returns the node of each rank, numbered by first appearance, from the `node_fingerprints` of all ranks.

    Nodes are known from torchrun's GROUP_RANK where every rank has one; else from LOCAL_WORLD_SIZE, where all ranks
    have the same: that many consecutive ranks share a node; else from the host names.
    """
    if group.group is None:
        return (0,) * group.size
    agents, sizes, host_names = zip(*fingerprints, strict=True)
    names: Sequence[int] = host_names
    if min(agents) >= 0:
        names = agents
    elif sizes[0] > 0 and len(set(sizes)) == 1:
        names = [rank // sizes[0] for rank in dist.get_process_group_ranks(group.group)]
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    return tuple(numbers[name] for name in names)


def _number(variable: str, least: int) -> int:
    """Returns the number in an environment variable; −1 without one, or for one below `least`."""
    number = environment_number(variable)
    return -1 if number is None or number < least else number
