"""Kernels of others (`fa4`, `cudnn`) compiled without a GPU, for the very arguments that our adapters call them with.

Run as a program, in a process of its own: the libraries read the architecture from the environment when they are
imported, and cuDNN asks torch for a GPU, for which three stand-ins answer.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from triton import knobs

from dbsp_kernels import KernelInputs
from scripts.checks.machine_code.compiler import disassembled

__all__ = ["OptionalCode", "compile_optional"]

ROWS, BLOCKS, WIDTH = 32, 32, 128


@dataclass(frozen=True)
class OptionalCode:
    """What became of one kernel.

    Attributes:
        sass: Its machine code.
        log: What Triton's ptxas says of its PTX: registers, spills, and whether products were serialised.
    """

    sass: str
    log: str


def compile_optional(kernel: str, arch: int, block_q: int, block_k: int) -> OptionalCode:
    """Compiles the forward for D 128 in bfloat16. Raises RuntimeError with what the library says where it refuses."""
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {
            "FLASH_ATTENTION_ARCH": f"sm_{arch}", "CUTE_DSL_ARCH": f"sm_{arch}a", "FLASH_ATTENTION_NUM_SMS": "132",
            "CUTE_DSL_KEEP_CUBIN": "1", "CUTE_DSL_KEEP_PTX": "1", "CUTE_DSL_DUMP_DIR": folder,
        }  # fmt: skip
        words = [sys.executable, "-m", __name__, kernel, str(arch), str(block_q), str(block_k)]
        done = subprocess.run(words, env=environment, capture_output=True, text=True)
        found = list(Path(folder).glob("*.cubin"))
        if done.returncode or not found:
            raise RuntimeError(f"{kernel} made no machine code: {done.stderr.strip()[-800:]}")
        cubin = max(found, key=lambda file: file.stat().st_size)
        said = _assembled(cubin.with_suffix(".ptx"), arch)
        return OptionalCode(disassembled(cubin.read_bytes()), said)


def _assembled(ptx: Path, arch: int) -> str:
    """What the newer one of Triton's two ptxas says, which knows all that cutlass' compiler writes."""
    assembler = knobs.nvidia.ptxas_blackwell
    words = [assembler.path, "-v", f"-arch=sm_{arch}a", "-o", os.devnull, str(ptx)]
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"ptxas refuses the PTX: {done.stderr.strip()[-500:]}")
    return done.stderr


def _inputs(block_q: int, block_k: int) -> KernelInputs:
    shapes = (ROWS, block_q), (BLOCKS, block_k), (BLOCKS, block_k)
    q, k, v = (torch.empty(*shape, WIDTH, dtype=torch.bfloat16, device="cuda") for shape in shapes)
    index, *counts = (torch.empty(shape, dtype=torch.int32, device="cuda") for shape in ((ROWS, 16), ROWS, ROWS, ROWS))
    return KernelInputs(q, k, v, index, counts[0], counts[1], WIDTH**-0.5, counts[2])


def _compile_fa4(block_q: int, block_k: int) -> None:
    from flash_attn.cute import flash_attn_func

    from dbsp_kernels.backends import fa4

    with FakeTensorMode(allow_non_fake_inputs=True):
        flash_attn_func(**fa4.forward_arguments(_inputs(block_q, block_k)))


def _compile_cudnn(arch: int, block_q: int, block_k: int) -> None:
    import types
    from unittest import mock

    import cutlass.base_dsl.runtime.cuda as driver
    import cutlass.cute as cute
    import tvm_ffi  # noqa: F401  before its types are stood in for
    from cudnn.block_sparse_attention import _interface, api

    from dbsp_kernels.backends import cudnn

    class Compiled(Exception):
        """Ends the call once there is code: to run it would need a GPU."""

    compiling = cute.compile

    def stop(*args: object, **options: object) -> None:
        compiling(*args, **options)
        raise Compiled

    gpu = types.SimpleNamespace(multi_processor_count=132, L2_cache_size=50 << 20)
    stream = types.SimpleNamespace(cuda_stream=0)
    with (
        mock.patch("torch.cuda.get_device_capability", return_value=divmod(arch, 10)),
        mock.patch("torch.cuda.get_device_properties", return_value=gpu),
        mock.patch("torch.cuda.current_device", return_value=0),
        mock.patch("torch.cuda.current_stream", return_value=stream),
        mock.patch("torch.cuda.device", return_value=torch.no_grad()),
        mock.patch.object(driver, "get_device_attribute", return_value=228 << 10),
        mock.patch.object(cute, "compile", stop),
        mock.patch.object(_interface.cuda, "CUstream", return_value=cute.runtime.make_fake_stream()),
        FakeTensorMode(allow_non_fake_inputs=True),
    ):
        try:
            api.block_sparse_attention_forward(**cudnn.forward_arguments(_inputs(block_q, block_k)))
        except Compiled:
            return
    raise RuntimeError("cuDNN's frontend compiled nothing")


if __name__ == "__main__":
    name, *numbers = sys.argv[1:]
    capability, rows, keys = map(int, numbers)
    if name == "fa4":
        _compile_fa4(rows, keys)
    else:
        _compile_cudnn(capability, rows, keys)
