"""Ranks that are threads, each with a simulated device of its own."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

from dbsp_core.comm.groups import PendingTransfer, explain_broken_connection
from tests.gpu_node import streams
from tests.gpu_node.faults import DeviceFault, recorded
from tests.gpu_node.tensors import DeviceTensor, inner, on_device
from tests.support.thread_group import Member, ThreadGroup, Transfer
from tests.support.thread_ranks import ThreadRanks
from tests.support.workers import SAFETY_NET_S


@dataclass(frozen=True)
class DeviceRanks:
    """`world` threads in one group over NCCL, rank r on cuda:r. `run` is `ThreadRanks.run`.

    A rank's current device is cuda:0 until something sets it, as in a process that torchrun has started.
    """

    world: int
    patience_s: float = SAFETY_NET_S

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        def on_its_device(rank: int, world: int, *args: Any) -> Any:
            streams._runtime.set_device(0)
            with streams.owning(rank):
                return function(rank, world, *args)

        with mock.patch.object(Member, "group", _device_group):
            return ThreadRanks(self.world, self.patience_s).run(on_its_device, *args)


def _device_group(member: Member) -> DeviceGroup:
    return DeviceGroup(member.rank, member.meeting.size, weakref.ref(member))  # type: ignore[arg-type]


class DeviceGroup(ThreadGroup):
    """A thread group that takes tensors on the rank's device, as NCCL does; its auxiliary groups take host tensors."""

    @property
    def over_nccl(self) -> bool:
        return not self._member.over_gloo

    def barrier(self) -> None:
        if not self._member.over_gloo:
            raise DeviceFault("monitored_barrier is gloo's; NCCL has none")
        super().barrier()

    def _start(
        self, kind: str, sent: torch.Tensor, send_splits: Sequence[int], receivers: Sequence[int],
        received: torch.Tensor, receive_splits: Sequence[int], sources: Sequence[int],
    ) -> PendingTransfer:  # fmt: skip
        self._check(sent)
        if self._member.over_gloo:
            return super()._start(kind, sent, send_splits, receivers, received, receive_splits, sources)
        if not sent.is_contiguous():
            raise ValueError("process groups send contiguous tensors")
        recorded.launch(f"NCCL {kind.split(' of ')[0]}", None)
        copy = inner(sent).detach().clone()
        parcels = dict(zip(receivers, copy.split(list(send_splits)), strict=True))
        with explain_broken_connection():
            number = self._member.meeting.post(self.rank, kind, parcels)
        values = inner(received), receive_splits, sources, inner(sent).detach(), copy
        work: Any = _DeviceTransfer(self._member, number, *values, into=received)
        return PendingTransfer(received, sent, (work,))

    def _gather(self, kind: str, mine: torch.Tensor) -> list[torch.Tensor]:
        if kind != "barrier":
            self._check(mine)
        if self._member.over_gloo or not isinstance(mine, DeviceTensor):
            return super()._gather(kind, mine)
        recorded.launch(f"NCCL {kind.split(' of ')[0]}", None)
        copy, meeting = mine.inner.detach().clone(), self._member.meeting
        with explain_broken_connection():
            number = meeting.post(self.rank, f"{kind} {mine.dtype}", dict.fromkeys(range(self.size), copy))
            found = meeting.read(self.rank, number, range(self.size))
        return [on_device(one.clone(), mine.device.index) for one in found]

    def _check(self, tensor: torch.Tensor) -> None:
        """Raises DeviceFault for a tensor that the group's backend does not take."""
        if self._member.over_gloo:
            if isinstance(tensor, DeviceTensor):
                raise DeviceFault(f"{tensor.device} tensor given to gloo, which copies it through the host")
        elif not isinstance(tensor, DeviceTensor):
            raise DeviceFault("CPU tensor given to NCCL")
        elif tensor.device.index != streams.current_device():
            raise DeviceFault(
                f"tensor on {tensor.device} given to NCCL while the current device is cuda:{streams.current_device()}"
            )


@dataclass(eq=False)
class _DeviceTransfer(Transfer):
    """A transfer of device tensors' values. They are the current stream's after `wait`, which is no host wait."""

    into: DeviceTensor | None = None

    def wait(self) -> None:
        if self.done or self.into is None:
            return
        super().wait()
        streams.submit(self.into.device.index, [], [self.into.memory], "a transfer")
