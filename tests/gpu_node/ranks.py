"""Ranks that are threads, each with a simulated device of its own."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

from dbsp_core.comm.groups import PendingTransfer
from tests.gpu_node import streams
from tests.gpu_node.faults import DeviceFault, recorded
from tests.gpu_node.tensors import DeviceTensor, inner, on_device, require_taken
from tests.support.thread_group import Member, ThreadGroup
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
        self._require_taken(kind, sent)
        pending = super()._start(kind, inner(sent), send_splits, receivers, inner(received), receive_splits, sources)
        if not isinstance(received, DeviceTensor):
            return pending
        recorded.launch(f"NCCL {kind.split(' of ')[0]}", None)
        works: Any = tuple(_DeviceTransfer(work, received) for work in pending.works)
        return PendingTransfer(received, sent, works)

    def _gather(self, kind: str, mine: torch.Tensor) -> list[torch.Tensor]:
        if kind != "barrier":
            self._require_taken(kind, mine)
        found = super()._gather(kind, inner(mine))
        if not isinstance(mine, DeviceTensor):
            return found
        recorded.launch(f"NCCL {kind.split(' of ')[0]}", None)
        return [on_device(one.clone(), mine.device.index) for one in found]

    def _require_taken(self, kind: str, tensor: torch.Tensor) -> None:
        require_taken(kind, [tensor], over_nccl=self.over_nccl, over_gloo=self._member.over_gloo)


@dataclass(eq=False)
class _DeviceTransfer:
    """A transfer of device tensors' values. They are the current stream's after `wait`, which is no host wait."""

    values: Any
    into: DeviceTensor

    def wait(self) -> None:
        if not self.values.done:
            self.values.wait()
            streams.submit(self.into.device.index, [], [self.into.memory], "a transfer")
