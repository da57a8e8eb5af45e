"""The ranks that share one sequence.

One process group serves every UxRy: exchanges span all P ranks under any strategy, and ring neighbors are peers in the
same group. Changing the strategy builds no new groups, and x and y may be any factors of P.
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

# Renamed in torch 2.13
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
BROKE_OFF = "communication between the ranks of the sequence broke off"
"""Start of the error message when a connection breaks."""
_OUTSIDE = "this rank is not in the process group; call db-SP on the group's ranks only"


class CommunicationError(RuntimeError):
    """Another rank has died or timed out; the group can no longer be used."""


class explain_broken_connection:  # a generator would cost 2 µs more per collective
    """Turns a broken connection in the body into a `CommunicationError` that quotes the original message."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, RuntimeError):
            raise CommunicationError(
                f"{BROKE_OFF}: another rank may have died or timed out; look for the first error in the other ranks' "
                f"output, and restart all ranks ({' '.join(str(error).split())})"
            ) from error


@dataclass
class PendingTransfer:
    """A tensor in flight, returned by `wait`; keeps the sent tensor alive until then."""

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

    Holds the process group by a weak reference, because attentions and autograd graphs may outlive it, and a group
    still alive when Python exits may abort the process.
    """

    rank: int
    size: int
    _held_by_torch: weakref.ref[dist.ProcessGroup] | None = None

    @classmethod
    def from_group(cls, group: dist.ProcessGroup | SequenceGroup | None = None) -> SequenceGroup:
        """Wraps a process group (None: the default group); a single process if torch.distributed is not initialized.

        Raises:
            UserError: torchrun started several processes but torch.distributed is not initialized, or this rank is not
                in the group.
        """
        if isinstance(group, SequenceGroup):
            return group
        if not dist.is_available() or not dist.is_initialized():
            world = environment_number("WORLD_SIZE") or 1
            if "RANK" in os.environ and world > 1:
                raise UserError(
                    f"torchrun started {world} processes, but torch.distributed is not initialized; call "
                    "torch.distributed.init_process_group() first (or unset WORLD_SIZE for a single process)"
                )
            return cls(0, 1)
        if group == dist.GroupMember.NON_GROUP_MEMBER:  # new_group's result on other ranks
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
        """The process group; do not keep a reference. Raises UserError if it was destroyed."""
        if self._held_by_torch is None:
            return None
        group = self._held_by_torch()
        if group is None:
            raise UserError(
                "the process group was destroyed; make new attentions and sessions for the new group (on a pipeline, "
                "call disable and then enable)"
            )
        return group

    @property
    def timeout(self) -> timedelta | None:
        """Time after which collectives fail; None if unknown."""
        group = self.group
        return None if group is None else timeout_of(group)

    @property
    def over_nccl(self) -> bool:
        """True if NCCL carries GPU tensors."""
        group = self.group
        return group is not None and over_nccl(group)

    def control(self) -> SequenceGroup:
        """Returns the `auxiliary` gloo group for comparisons on the host."""
        return self.auxiliary(CONTROL)

    def for_host_tensors(self) -> SequenceGroup:
        """Returns a group of the same ranks for CPU tensors: this one, or `control` with NCCL.

        Comparisons run on the host, whatever the device of q, k and v: they must not wait for that device, and a rank
        with tensors on a wrong device must be able to report it.
        """
        return self.control() if self.over_nccl else self

    def auxiliary(self, purpose: str) -> SequenceGroup:
        """Returns a separate gloo group of the same ranks for one purpose. Collective at the first call.

        It has this group's timeout and is destroyed with it.
        """
        group = self.group
        if group is None:
            return self
        with explain_broken_connection():
            return self._made(group, purpose, range(self.size), "gloo")

    def part(self, first: int, size: int) -> SequenceGroup:
        """Returns a group of the `size` ranks from `first` on, which must include this one, on the same backend.

        It has this group's timeout and is destroyed with it. Collective for its ranks at the first call; no group is
        made for a single rank, or for all ranks.
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
        """Runs an all-to-all with unequal splits along dim 0; returns [Σ receive_splits, ...] by source rank."""
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
        """Returns every rank's tensor, by rank; shapes must be equal."""
        if self.size == 1:
            return [mine]
        mine = mine.contiguous()
        gathered = [torch.empty_like(mine) for _ in range(self.size)]
        with explain_broken_connection():
            dist.all_gather(gathered, mine, group=self.group)
        return gathered

    def all_gather_along(self, mine: torch.Tensor) -> torch.Tensor:
        """Concatenates every rank's contiguous tensor along dim 0; shapes must be equal."""
        if self.size == 1:
            return mine
        gathered = mine.new_empty(self.size * len(mine), *mine.shape[1:])
        with explain_broken_connection():
            _all_gather_single(gathered, mine, group=self.group)
        return gathered

    def broadcast(self, values: torch.Tensor) -> None:
        """Copies rank 0's contiguous tensor to all ranks; shapes and dtypes must be equal."""
        group = self.group
        if group is None or self.size == 1:
            return
        with explain_broken_connection():
            dist.broadcast(values, dist.get_global_rank(group, 0), group=group)

    def gather_integers(self, values: Sequence[int]) -> list[list[int]]:
        """Returns every rank's integers (below 2^63), by rank, exchanged on the host."""
        mine = torch.tensor(values, dtype=torch.int64, device="cpu")
        return [rank_values.tolist() for rank_values in self.for_host_tensors().all_gather(mine)]

    def barrier(self) -> None:
        """Waits until all ranks of a gloo group have called it. Raises RuntimeError on timeout."""
        if self.alone:
            return
        try:
            dist.monitored_barrier(self.group, self.timeout)
        except RuntimeError as error:
            limit = "the time limit" if self.timeout is None else f"{self.timeout.total_seconds():g} s"
            raise RuntimeError(
                f"not all ranks came within {limit}; the run may have failed on one ({' '.join(str(error).split())})"
            ) from error


def gather_shards(shard: torch.Tensor, dim: int, group: SequenceGroup) -> torch.Tensor:
    """Concatenates all ranks' shards of equal shape along `dim`. Collective and differentiable.

    Every rank must compute the whole loss; backward then takes the gradient of the rank's own shard without
    communication. Gradients of parameters must be summed over the group.
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
    """Returns the three integers from which `number_nodes` infers this rank's node."""
    numbers = [environment_number(name) for name in ("GROUP_RANK", "LOCAL_WORLD_SIZE")]  # −1: unset
    return [*(-1 if number is None else number for number in numbers), fingerprint_of(socket.gethostname())]


def number_nodes(group: SequenceGroup, fingerprints: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Returns the node of each rank, numbered by first appearance, from all ranks' `node_fingerprints`.

    Uses torchrun's GROUP_RANK if every rank has it; else LOCAL_WORLD_SIZE if equal on all ranks (so many consecutive
    ranks share a node); else host names.
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
