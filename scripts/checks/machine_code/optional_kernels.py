"""FlashAttention-4 (`fa4`) compiled without a GPU, for the arguments that our adapter passes.

Runs as a program in a separate process: the library reads the architecture from the environment when it is imported.
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

__all__ = ["OptionalCode", "compile_fa4"]

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


def compile_fa4(arch: int, block_q: int, block_k: int) -> OptionalCode:
    """Compiles the forward for D 128 in bfloat16. Raises RuntimeError with what the library says where it refuses."""
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {
            "FLASH_ATTENTION_ARCH": f"sm_{arch}", "CUTE_DSL_ARCH": f"sm_{arch}a", "FLASH_ATTENTION_NUM_SMS": "132",
            "CUTE_DSL_KEEP_CUBIN": "1", "CUTE_DSL_KEEP_PTX": "1", "CUTE_DSL_DUMP_DIR": folder,
        }  # fmt: skip
        words = [sys.executable, "-m", __name__, str(block_q), str(block_k)]
        done = subprocess.run(words, env=environment, capture_output=True, text=True)
        found = list(Path(folder).glob("*.cubin"))
        if done.returncode or not found:
            raise RuntimeError(f"fa4 made no machine code: {done.stderr.strip()[-800:]}")
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


if __name__ == "__main__":
    _compile_fa4(*map(int, sys.argv[1:]))
