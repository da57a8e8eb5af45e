"""What the simulated node runs: programs that CUDA would reject, or get wrong, next to right ones."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from dbsp_core import SequenceGroup
from dbsp_kernels import KernelInputs, merge_into
from dbsp_kernels.triton.forward import triton_attention
from dbsp_kernels.triton.tiles import Tiles
from tests.gpu_node import streams
from tests.gpu_node.faults import recorded
from tests.gpu_node.tensors import DeviceTensor
from tests.simulated.raw_kernel import double_kernel


def rejected(rank: int, world: int, name: str) -> str | None:
    """Returns what a program is rejected with; None where it runs."""
    torch.cuda.set_device(rank)
    try:
        PROGRAMS[name](torch.device("cuda", rank))
    except (RuntimeError, TypeError) as error:
        return str(error)
    return None


def _mixed_devices(device: torch.device) -> None:
    if device.index == 1:
        torch.ones(3, device=device) + _on_another_device(torch.ones(3))


def _on_another_device(values: torch.Tensor) -> torch.Tensor:
    with streams.owning(None):
        return DeviceTensor(values, 0)


def _host_and_device(device: torch.device) -> None:
    torch.ones(3, device=device).index_select(0, torch.zeros(1, dtype=torch.int64))


def _to_numpy(device: torch.device) -> None:
    torch.ones(3, device=device).numpy()


def _read_without_wait(device: torch.device) -> None:
    side = torch.cuda.Stream(device)
    with torch.cuda.stream(side):
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


def _context_on_another_device(device: torch.device) -> None:
    torch.ones(3, device=torch.device("cuda", 1 - device.index))


def _thread_without_device(device: torch.device) -> None:
    """A thread starts on cuda:0, for any parent's device is."""
    caught: list[BaseException] = []

    def work() -> None:
        try:
            torch.ones(3, device="cuda")
        except BaseException as error:
            caught.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    if caught:
        raise caught[0]


def _raw_launch(device: torch.device, *, current: int, host: bool = False) -> None:
    values = torch.ones(16, device=device)
    other = torch.ones(16) if host else values
    before = torch.cuda.current_device()
    streams._runtime.set_device(current)
    try:
        double_kernel[(1,)](values, other, 16, SIZE=16)
    finally:
        streams._runtime.set_device(before)


def _grid_too_large(device: torch.device) -> None:
    values = torch.ones(16, device=device)
    double_kernel[(1, 65536)](values, values, 16, SIZE=16)


def _too_much_shared_memory(device: torch.device) -> None:
    """Eight stages of 128 keys and values of width 128."""
    q, table = torch.ones(1, 128, 128, device=device), torch.ones(1, 1, dtype=torch.int32, device=device)
    inputs = KernelInputs(q, q, q, table * 0, table[0], table[0] * 128, 1.0)
    triton_attention(inputs, Tiles(128, 128, warps=8, stages=8))


def _host_tensor_to_nccl(device: torch.device) -> None:
    SequenceGroup.from_group().all_gather(torch.ones(3))


def _device_tensor_to_gloo(device: torch.device) -> None:
    SequenceGroup.from_group().control().all_gather(torch.ones(3, device=device))


def _barrier_on_nccl(device: torch.device) -> None:
    SequenceGroup.from_group().barrier()


def _changed_in_flight(device: torch.device) -> None:
    group, sent = SequenceGroup.from_group(), torch.ones(4, device=device)
    pending = group.start_all_to_all(sent, [2, 2], [2, 2])
    sent.zero_()
    pending.wait()


def _right(device: torch.device) -> None:
    """Everything of the above, done as CUDA wants it."""
    values, side, event = torch.ones(16, device=device), torch.cuda.Stream(device), torch.cuda.Event()
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        doubled = values + 1
        event.record(side)
    torch.cuda.current_stream(device).wait_event(event)
    double_kernel[(1,)](doubled, doubled, 16, SIZE=16)
    assert doubled.cpu().tolist() == [4.0] * 16
    group = SequenceGroup.from_group()
    found = group.all_to_all(torch.full((2,), float(device.index), device=device), [1, 1], [1, 1])
    assert found.cpu().tolist() == [0.0, 1.0]
    assert torch.equal(values.index_select(0, torch.zeros(1, dtype=torch.int64, device=device)).cpu(), torch.ones(1))


PROGRAMS: dict[str, Callable[[torch.device], Any]] = {
    "right": _right,
    "mixed devices": _mixed_devices,
    "host and device": _host_and_device,
    "to numpy": _to_numpy,
    "read without a wait": _read_without_wait,
    "overwritten while read": _overwritten_while_read,
    "read after an earlier event": _read_after_an_earlier_event,
    "a context on another device": _context_on_another_device,
    "a thread without its device": _thread_without_device,
    "a launch while another device is current": lambda device: _raw_launch(device, current=1 - device.index),
    "a launch with a host tensor": lambda device: _raw_launch(device, current=device.index, host=True),
    "a grid that is too large": _grid_too_large,
    "too much shared memory": _too_much_shared_memory,
    "a host tensor to NCCL": _host_tensor_to_nccl,
    "a device tensor to gloo": _device_tensor_to_gloo,
    "a barrier on NCCL": _barrier_on_nccl,
    "changed in flight": _changed_in_flight,
}


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


def late_copy(rank: int, world: int) -> tuple[list[int], list[int]]:
    """Returns what a host reads of an asynchronous copy before it waits, and after."""
    values, there = torch.arange(3, device="cuda"), torch.zeros(3, dtype=torch.int64, pin_memory=True)
    there.copy_(values, non_blocking=True)
    event = torch.cuda.current_stream().record_event()
    before = there.tolist()
    event.synchronize()
    return before, there.tolist()


def gradients(rank: int, world: int) -> tuple[list[float], int, str]:
    """Returns a gradient, the device that was current in backward, and the gradient's own."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    seen: list[int] = []

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
    return values.grad.cpu().tolist(), seen[0], str(values.grad.device)


def peaks(rank: int, world: int) -> tuple[int, int]:
    """Returns the bytes that are allocated at most, and at the end, beyond those at the beginning."""
    device = torch.device("cuda", rank)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    one = torch.empty(1000, dtype=torch.uint8, device=device)
    two = torch.empty(500, dtype=torch.uint8, device=device)
    view = two[:100]
    del two
    del one
    most, now = torch.cuda.max_memory_allocated(device), torch.cuda.memory_allocated(device)
    return most - before, now - before + 0 * view.numel()


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
