"""Compiles what a launch would compile: db-SP's own launching functions run on tensors without memory, for any GPU.

So a kernel's constants, options and specialisations (strides of 1, strides and pointers that are multiples of 16) are
those of a run, for any launching function makes of the tensors' shapes.
"""

from __future__ import annotations

import contextlib
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction


@dataclass(frozen=True)
class Compiled:
    """ttgir: Triton's last own form; ptx, sass: assembly; log: what ptxas said; shared: bytes of a program"""

    ttgir: str
    ptx: str
    sass: str
    log: str
    shared: int


def compiled_launches(launch: Callable[[], object], arch: int, name: str) -> list[Compiled]:
    """Runs `launch` on tensors without memory that seem to be on a GPU, and compiles Triton kernels that it launches.

    Args:
        launch: Makes its tensors itself (`torch.empty(…)`) and calls a launching function.
        arch: 90 for Hopper.
        name: Of the kernels' function, without leading underscores; others that are launched are passed over.
    """
    launches = []
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        if self.fn.__name__.lstrip("_") != name:
            return
        with _kept_logs() as logs:
            made = run(self, *args, grid=grid, warmup=True, **options)
        launches.append((made, "".join(logs)))

    with gpu_of(arch), mock.patch.object(JITFunction, "run", compile_only), FakeTensorMode():
        launch()
    return [
        Compiled(made.asm["ttgir"], made.asm["ptx"], _disassembled(made.asm["cubin"]), said, made.metadata.shared)
        for made, said in launches
    ]


@contextlib.contextmanager
def _kept_logs() -> Iterator[list[str]]:
    """Adds to the list ptxas' messages, which Triton writes to a file and deletes; 3.4 cannot print them."""
    logs: list[str] = []
    run = subprocess.run

    def run_and_keep(*args: Any, stderr: Any = None, **options: Any) -> Any:
        done = run(*args, stderr=stderr, **options)
        if hasattr(stderr, "name"):  # Triton's file for it
            logs.append(Path(stderr.name).read_text(encoding="utf-8"))
        return done

    with mock.patch.object(subprocess, "run", run_and_keep):
        yield logs


def _disassembled(cubin: bytes) -> str:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "kernel.cubin")
        file.write_bytes(cubin)
        command = [knobs.nvidia.cuobjdump.path, "-sass", str(file)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@contextlib.contextmanager
def gpu_of(arch: int) -> Iterator[None]:
    """Replaces the GPU by one of this capability, as far as launching functions and Triton's compiler ask for one."""
    # Triton keeps what it compiled by device number: one number for each kind.
    stub = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", arch, 32),
        get_current_device=lambda: arch,
        get_current_stream=lambda device: 0,
    )
    before = dict(vars(driver))
    with (
        mock.patch.object(FakeTensor, "data_ptr", return_value=0),
        mock.patch.object(FakeTensor, "is_cuda", True, create=True),
        mock.patch.object(torch.cuda, "get_device_capability", return_value=divmod(arch, 10)),
        mock.patch.object(torch.cuda, "current_device", return_value=0),
        mock.patch.object(torch.cuda, "device", return_value=contextlib.nullcontext()),
        knobs.compilation.scope(),
    ):
        knobs.compilation.always_compile = True  # from a cache there would be nothing said
        driver.set_active(stub)
        try:
            yield
        finally:
            vars(driver).update(before)
