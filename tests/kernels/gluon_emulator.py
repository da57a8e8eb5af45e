"""Runs a Gluon kernel on the CPU: its own source, with stand-ins for what it uses of Gluon.

One thread for each of its partitions. Copies land late and in random order, products are computed when they are waited
for and not before, memory is NaN until written, and a kernel whose partitions all wait raises: so a slot that is given
back too early gives wrong results, and one that is not given back is found. What it cannot show is what layouts,
fences and the memory model of a GPU do.
"""

from __future__ import annotations

import random
import sys
import threading
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


class Deadlock(Exception):
    """All partitions wait for each other."""


class Pointer:
    """Into a tensor, at one place or many."""

    def __init__(self, tensor: torch.Tensor, at: Any = 0) -> None:
        self.tensor, self.at = tensor.view(-1), at
        self.dtype = types.SimpleNamespace(element_ty=tensor.dtype)

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.tensor, self.at + offset)


class Memory:
    """Shared memory. Poisoned, as it is on a GPU."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.shape, self.dtype = tensor, tensor.shape, tensor.dtype

    def index(self, i: int) -> Memory:
        return Memory(self.tensor[int(i)])

    def permute(self, order: tuple[int, ...]) -> Memory:
        return Memory(self.tensor.permute(order))


class Barrier:
    """An mbarrier: a phase ends when all have arrived and all announced bytes have come."""

    def __init__(self) -> None:
        self.count = self.missing = self.bytes = self.phase = 0

    def settle(self) -> None:
        assert self.missing >= 0, "more arrivals than the barrier was made for"
        if self.missing == 0 and self.bytes == 0:
            self.phase, self.missing = self.phase ^ 1, self.count


class Emulator:
    """One program's execution."""

    def __init__(self, program: int, seed: int) -> None:
        self.program = program
        self.random = random.Random(seed)
        self.changed = threading.Condition()
        self.copies: list[Callable[[], None]] = []
        self.live, self.waiting, self.dead = 1, 0, False

    def land(self, all_of_them: bool) -> None:
        """Some of the copies that are on their way arrive, in any order."""
        self.random.shuffle(self.copies)
        while self.copies and (all_of_them or self.random.random() < 0.5):
            self.copies.pop()()
            self.tell()

    def tell(self) -> None:
        """Something has changed: whoever waits looks again."""
        self.waiting = 0
        self.changed.notify_all()

    def wait(self, barrier: Barrier, parity: int) -> None:
        with self.changed:
            self.land(False)
            while barrier.phase == int(parity):
                self.waiting += 1
                if self.waiting == self.live:
                    self.dead = not self.copies
                    self.land(True)
                    self.changed.notify_all()
                else:
                    self.changed.wait()
                if self.dead:
                    raise Deadlock

    def arrive(self, barrier: Barrier, count: int = 1, pred: Any = True) -> None:
        with self.changed:
            if pred:
                barrier.missing -= count
                barrier.settle()
                self.tell()

    def expect(self, barrier: Barrier, nbytes: int) -> None:
        with self.changed:
            barrier.bytes += nbytes
            barrier.missing -= 1
            barrier.settle()

    def copy(self, described: Any, place: list[Any], barrier: Barrier, memory: Memory) -> None:
        def arrive() -> None:
            rows, _ = described.block_type.shape
            first = int(place[0])
            memory.tensor.copy_(described.matrix[first : first + rows])
            barrier.bytes -= described.block_type.nbytes
            barrier.settle()

        with self.changed:
            memory.tensor.fill_(torch.nan)
            self.copies.append(arrive)

    def specialise(self, partitions: list[tuple[Callable, tuple]], *_: Any) -> None:
        failures: list[BaseException] = []

        def run(function: Callable, arguments: tuple) -> None:
            try:
                function(*arguments)
            except BaseException as failure:
                failures.append(failure)
            with self.changed:
                self.live -= 1
                self.tell()

        with self.changed:
            self.live = len(partitions)
        threads = [threading.Thread(target=run, args=partition) for partition in partitions]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]


def described(t: torch.Tensor, rows: int) -> Any:
    """A descriptor of [n, B, D] as a matrix, with tiles of `rows`."""
    shape = (rows, t.shape[-1])
    block = types.SimpleNamespace(shape=shape, nbytes=rows * t.shape[-1] * t.element_size())
    return types.SimpleNamespace(matrix=t.flatten(0, 1), block_type=block, dtype=t.dtype, layout=None)


def run(
    file: Path, kernel: str, programs: int, arguments: list[Any], constants: dict[str, Any], seed: int = 0
) -> None:
    """Runs all programs of a kernel in a file, one after the other. Tensors among the arguments become pointers."""
    pointed = [Pointer(a) if isinstance(a, torch.Tensor) else a for a in arguments]
    for program in range(programs):
        emulator = Emulator(program, seed + program)
        _loaded(file, emulator)[kernel](*pointed, **constants)
        assert not emulator.copies, "a copy that nobody waited for"


def _loaded(file: Path, emulator: Emulator) -> dict[str, Any]:
    language = _language(emulator)
    mbarrier = types.SimpleNamespace(
        MBarrierLayout=lambda: None,
        init=lambda barrier, count: vars(barrier).update(count=count, missing=count),
        expect=emulator.expect,
        arrive=emulator.arrive,
        wait=emulator.wait,
    )
    hopper = types.ModuleType("hopper")
    hopper.mbarrier = mbarrier
    hopper.tma = types.SimpleNamespace(async_load=emulator.copy)
    hopper.fence_async_shared = lambda: None
    hopper.warpgroup_mma = _product
    hopper.warpgroup_mma_wait = lambda pendings, deps: deps[0]() if callable(deps[0]) else deps[0]
    gluon = types.ModuleType("gluon")
    gluon.jit, gluon.language = lambda function: function, language
    base = "triton.experimental.gluon"
    stand_ins = {
        "triton.experimental": types.ModuleType("experimental"),
        base: gluon,
        f"{base}.language": language,
        f"{base}.language.nvidia": types.ModuleType("nvidia"),
        f"{base}.language.nvidia.hopper": hopper,
    }
    stand_ins["triton.experimental"].gluon = gluon
    before = {name: sys.modules.get(name) for name in stand_ins}
    sys.modules |= stand_ins
    try:
        names: dict[str, Any] = {"__name__": "emulated"}
        exec(compile(file.read_text(), str(file), "exec"), names)
        return names
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


def _product(a: Any, b: Memory, acc: torch.Tensor, use_acc: bool = True, is_async: bool = False) -> Callable:
    """What it reads, it reads when it is waited for: as late as the hardware may."""

    def finished() -> torch.Tensor:
        left = a.tensor if isinstance(a, Memory) else a
        return left.float() @ b.tensor.float() + (acc if use_acc else 0)

    return finished


def _language(emulator: Emulator) -> Any:
    def load(pointer: Pointer) -> torch.Tensor:
        return pointer.tensor[int(pointer.at)]

    def store(pointer: Pointer, value: torch.Tensor) -> None:
        pointer.tensor[pointer.at] = value

    def allocate(dtype: torch.dtype, shape: list[int], layout: Any) -> Any:
        if dtype == torch.int64:
            barriers = [Barrier() for _ in range(shape[0])]
            return types.SimpleNamespace(index=lambda i: barriers[int(i)])
        return Memory(torch.full(shape, torch.nan, dtype=dtype))

    language = types.ModuleType("language")
    nothing = lambda *args, **kwargs: None  # noqa: E731
    members = {
        "constexpr": object, "int32": torch.int32, "int64": torch.int64, "float32": torch.float32,
        "SliceLayout": nothing, "NVMMADistributedLayout": nothing, "DotOperandLayout": nothing,
        "program_id": lambda axis: torch.tensor(emulator.program),
        "load": load, "store": store, "allocate_shared_memory": allocate,
        "arange": lambda first, last, layout: torch.arange(first, last),
        "zeros": lambda shape, dtype, layout: torch.zeros(shape, dtype=dtype),
        "full": lambda shape, value, dtype, layout: torch.full(shape, value, dtype=dtype),
        "minimum": lambda a, b: min(int(a), int(b)), "maximum": torch.maximum,
        "max": lambda t, axis: t.amax(axis), "sum": lambda t, axis: t.sum(axis),
        "exp2": torch.exp2, "log2": torch.log2, "where": torch.where,
        "to_tensor": int,
        "convert_layout": lambda t, layout: t, "static_range": range, "warp_specialize": emulator.specialise,
    }  # fmt: skip
    vars(language).update(members)
    return language
