"""Compiles a Triton or Gluon kernel for a GPU that is not here, and keeps what the compilers say and make."""

from __future__ import annotations

import contextlib
import io
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


@dataclass(frozen=True)
class Compiled:
    """ttgir: Triton's last own form; ptx, sass: assembly; log: what ptxas said; shared: bytes of a program"""

    ttgir: str
    ptx: str
    sass: str
    log: str
    shared: int


def compile_kernel(
    kernel: Any, arch: int, types: dict[str, str], constants: dict[str, Any], aligned: set[str], **options: Any
) -> Compiled:
    """Compiles by the installed Triton, with the ptxas and the flags that it takes on a GPU.

    arch:    90 for Hopper
    types:   of every argument that is no constant, in Triton's words ("*bf16", "i32", "tensordesc<…>")
    aligned: arguments that are multiples of 16; pointers always are
    options: num_warps and so on
    """
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else types[name] for name in names}
    multiple = {(names.index(n),): [["tt.divisibility", 16]] for n in names if n in aligned or "*" in signature[n]}
    form = ASTSource
    if hasattr(kernel, "is_gluon") and kernel.is_gluon():
        from triton.experimental.gluon._runtime import GluonASTSource as form  # type: ignore[no-redef]
    said = io.StringIO()
    with knobs.compilation.scope(), knobs.nvidia.scope(), contextlib.redirect_stdout(said):
        knobs.compilation.always_compile = True  # from a cache there would be nothing said
        knobs.nvidia.dump_ptxas_log = True
        source = form(kernel, signature, constants, multiple)
        compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    return Compiled(
        compiled.asm["ttgir"],
        compiled.asm["ptx"],
        disassembled(compiled.asm["cubin"]),
        said.getvalue(),
        compiled.metadata.shared,
    )


def disassembled(cubin: bytes) -> str:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "kernel.cubin")
        file.write_bytes(cubin)
        command = [knobs.nvidia.cuobjdump.path, "-sass", str(file)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
