"""The simulated node itself: it finds what it is there to find; all other tests here are right programs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from dbsp_core import SequenceGroup
from dbsp_kernels import KernelInputs, merge_into
from dbsp_kernels.triton.forward import triton_attention
from dbsp_kernels.triton.tiles import Tiles
from tests.gpu_node import streams
from tests.gpu_node.faults import recorded
from tests.gpu_node.node import GpuNode
from tests.gpu_node.tensors import DeviceTensor
from tests.simulated.model_cases import own_device
from tests.support import interpreter
from tests.support.outcomes import said

with interpreter.interpreted():
    import triton
    import triton.language as tl

    @triton.jit
    def double_kernel(out_ptr, in_ptr, count, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
        offset = tl.arange(0, SIZE)
        tl.store(out_ptr + offset, 2 * tl.load(in_ptr + offset, mask=offset < count), mask=offset < count)


def _mixed_devices(device: torch.device) -> None:
    if device.index == 1:
        with streams.owning(None):
            other = DeviceTensor(torch.ones(3), 0)
        torch.ones(3, device=device) + other


def _read_without_wait(device: torch.device) -> None:
    with torch.cuda.stream(torch.cuda.Stream(device)):
        made = torch.ones(3, device=device)
    made.sum()


def _overwritten_while_read(device: torch.device) -> None:
    side, values = torch.cuda.Stream(device), torch.ones(3, device=device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        values.sum()
    values.zero_()


def _read_after_an_earlier_event(device: torch.device) -> None:
    side, event = torch.cuda.Stream(device), torch.cuda.Event()
    with torch.cuda.stream(side):
        event.record(side)
        made = torch.ones(3, device=device)
    event.wait()
    made.sum()


def _thread_without_device(device: torch.device) -> None:
    """Starts a thread, which begins on cuda:0, independent of its parent's device."""
    caught: list[str] = []
    thread = threading.Thread(target=lambda: caught.append(said(lambda: torch.ones(3, device="cuda"))))
    thread.start()
    thread.join()
    if caught != ["nothing"]:
        raise RuntimeError(*caught)


def _launch_on_another_device(device: torch.device) -> None:
    values = torch.ones(16, device=device)
    with streams.owning(None), torch.cuda.device(1 - device.index):
        double_kernel[(1,)](values, values, 16, SIZE=16)


def _transfer_on_another_device(device: torch.device) -> None:
    values = torch.ones(16, device=device)
    with streams.owning(None), torch.cuda.device(1 - device.index):
        SequenceGroup.from_group().all_gather(values)


def _too_much_shared_memory(device: torch.device) -> None:
    """Asks for eight stages of 128 keys and values of width 128."""
    q, table = torch.ones(1, 128, 128, device=device), torch.ones(1, 1, dtype=torch.int32, device=device)
    inputs = KernelInputs(q, q, q, table * 0, table[0], table[0] * 128, 1.0)
    triton_attention(inputs, Tiles(128, 128, warps=8, stages=8))


def _changed_in_flight(device: torch.device) -> None:
    group, sent = SequenceGroup.from_group(), torch.ones(4, device=device)
    pending = group.start_all_to_all(sent, [2, 2], [2, 2])
    sent.zero_()
    pending.wait()


PROGRAMS: dict[str, tuple[Callable[[torch.device], Any], int, str]] = {
    "mixed devices": (_mixed_devices, 1, "Expected all tensors to be on the same device"),
    "host and device": (
        lambda device: torch.ones(3, device=device).index_select(0, torch.zeros(1, dtype=torch.int64)),
        0,
        "host tensors of shapes [(1,)]",
    ),
    "to numpy": (lambda device: torch.ones(3, device=device).numpy(), 0, "Use Tensor.cpu() first"),
    "read without a wait": (_read_without_wait, 0, "without a wait"),
    "overwritten while read": (_overwritten_while_read, 0, "overwrites what is read"),
    "read after an earlier event": (_read_after_an_earlier_event, 0, "without a wait"),
    "a thread without its device": (
        _thread_without_device,
        1,
        "a context on cuda:0, in a thread of the rank on cuda:1",
    ),
    "a launch while another device is current": (_launch_on_another_device, 0, "but the current device is 1"),
    "a transfer while another device is current": (
        _transfer_on_another_device,
        0,
        "given to NCCL while the current device is 1",
    ),
    "a launch with a host tensor": (
        lambda device: double_kernel[(1,)](torch.ones(16, device=device), torch.ones(16), 16, SIZE=16),
        0,
        "on the host",
    ),
    "a grid that is too large": (
        lambda device: double_kernel[(1, 65536)](*[torch.ones(16, device=device)] * 2, 16, SIZE=16),
        0,
        "grid (1, 65536)",
    ),
    "too much shared memory": (_too_much_shared_memory, 0, "sm90 has 232448"),
    "a host tensor to NCCL": (
        lambda _: SequenceGroup.from_group().all_gather(torch.ones(3)),
        0,
        "CPU tensor given to NCCL",
    ),
    "a device tensor to gloo": (
        lambda device: SequenceGroup.from_group().control().all_gather(torch.ones(3, device=device)),
        0,
        "given to gloo",
    ),
    "a barrier on NCCL": (lambda _: SequenceGroup.from_group().barrier(), 0, "NCCL has none"),
    "changed in flight": (_changed_in_flight, 0, "changed before it waited"),
}
"""Programs that CUDA would reject, or get wrong, a rank on which it does, and the error there."""


def rejected(rank: int, world: int, name: str) -> str:
    device = own_device(rank)
    try:
        return said(lambda: PROGRAMS[name][0](device))
    except TypeError as error:
        return str(error)


@pytest.mark.parametrize("name", PROGRAMS)
def test_node_rejects_what_cuda_rejects(gpu_node: GpuNode, name: str) -> None:
    _, rank, text = PROGRAMS[name]
    assert text in gpu_node.run(2, rejected, name)[rank]


def waits(rank: int, world: int) -> dict[str, int]:
    """Returns the host waits of one line each, by what waits and its line's number within the function."""
    device = torch.device("cuda", 0)
    values, pinned = torch.arange(6, device=device), torch.ones(6, pin_memory=True)
    first = waits.__code__.co_firstlineno
    recorded.clear()
    values.sum().item()
    values.tolist()
    values.cpu()
    values.nonzero()
    values[values > 2]
    torch.ones(3).to(device)
    pinned.to(device)
    pinned.to(device, non_blocking=True)
    torch.cuda.synchronize()
    values[1:].sum() + 1
    found = {}
    for text, times in recorded.host_waits.items():
        what, _, line = text.partition(" at ")
        found[f"{what}, line {int(line.rpartition(':')[2]) - first}"] = times
    return found


def test_host_waits_are_counted_at_their_lines(gpu_node: GpuNode) -> None:
    (found,) = gpu_node.run(1, waits)
    assert found == {
        "_local_scalar_dense, line 6": 1,
        "tolist, line 7": 1,
        "copy to the host, line 8": 1,
        "nonzero, line 9": 1,
        "index, line 10": 1,
        "copy from pageable memory, line 11": 1,
        "copy from the host, line 12": 1,
        "synchronize, line 14": 1,
    }


def late_copy(rank: int, world: int) -> None:
    values, there = torch.arange(3, device="cuda"), torch.zeros(3, dtype=torch.int64, pin_memory=True)
    there.copy_(values, non_blocking=True)
    event = torch.cuda.current_stream().record_event()
    assert there.tolist() != [0, 1, 2]
    event.synchronize()
    assert there.tolist() == [0, 1, 2]


def test_asynchronous_copy_is_not_there_before_the_host_waits(gpu_node: GpuNode) -> None:
    gpu_node.run(1, late_copy)


def gradients(rank: int, world: int) -> None:
    device, seen = own_device(rank), []

    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, values: torch.Tensor) -> torch.Tensor:
            return values * 2

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            seen.append(torch.cuda.current_device())
            return gradient * 2

    values = torch.arange(3.0, device=device).requires_grad_()
    Doubled.apply(values).square().sum().backward()
    assert values.grad is not None
    assert (values.grad.cpu().tolist(), seen, values.grad.device) == ([0.0, 8.0, 16.0], [rank], device)


def test_backward_runs_on_the_device_of_its_tensors(gpu_node: GpuNode) -> None:
    gpu_node.run(2, gradients)


def variants(rank: int, world: int) -> tuple[int, int]:
    """Variants of the merge kernel: for several numbers of tokens, and for an output that is not aligned as well."""
    device = torch.device("cuda", rank)
    recorded.clear()
    for tokens in (1, 5, 16):
        out, lse = torch.zeros(tokens, 32, device=device), torch.zeros(tokens, device=device)
        merge_into(out, lse, torch.zeros_like(out), torch.zeros_like(lse))
    similar = len(recorded.variants["merge_kernel"])
    out = torch.zeros(5 * 32 + 1, device=device)[1:].view(5, 32)
    lse = torch.zeros(5, device=device)
    merge_into(out, lse, torch.zeros(5, 32, device=device), torch.zeros_like(lse))
    return similar, len(recorded.variants["merge_kernel"])


def test_variants_are_counted_as_triton_specialises(gpu_node: GpuNode) -> None:
    """Excludes numbers and addresses that a kernel leaves unspecialised."""
    assert gpu_node.run(1, variants) == [(1, 2)]
