"""Run in a process of its own: the Triton kernel under Triton's interpreter, or compiled for GPUs that are not here.

`python triton_cases.py interpret` (with TRITON_INTERPRET=1) prints relative errors as JSON; `compile` prints the sizes
of the machine code.
"""

from __future__ import annotations

import itertools
import json
import sys
from typing import Any

import torch

DTYPES = {"float32": 1e-6, "float16": 1e-3, "bfloat16": 8e-3}
SHAPES = ((16, 16, 16), (64, 64, 64), (64, 128, 64), (128, 64, 32), (48, 33, 24), (17, 160, 40), (192, 16, 16))


def interpret() -> list[dict[str, Any]]:
    """Every block-size mix and dtype: short blocks, an empty row, the same block twice, strided inputs."""
    from dbsp_kernels import block_attention

    results = []
    for seed, (dtype, (block_q, block_k, width)) in enumerate(itertools.product(DTYPES, SHAPES)):
        generator = torch.Generator().manual_seed(seed)
        q = torch.randn(5, block_q, width, generator=generator).to(getattr(torch, dtype))
        kv = torch.randn(6, block_k, 2, width, generator=generator).to(getattr(torch, dtype))
        k, v = kv[:, :, 0], kv[:, :, 1]
        index = torch.randint(0, 6, (5, 4), generator=generator, dtype=torch.int32)
        count = torch.tensor([2, 0, 4, 1, 3], dtype=torch.int32)
        length = torch.randint(1, block_k + 1, (6,), generator=generator, dtype=torch.int32)
        out, lse = block_attention(q, k, v, index, count, length, kernel="triton")
        wide = (t.double() for t in (q, k, v))
        expected, expected_lse = block_attention(*wide, index, count, length, kernel="reference")
        some = count > 0
        results.append(
            {
                "case": [dtype, block_q, block_k, width],
                "out": float((out.double() - expected).norm() / expected.norm()),
                "lse": float((lse[some] - expected_lse[some]).abs().max()),
                "empty": [float(out[1].abs().max()), float(lse[1].max())],
            }
        )
    return results


def compile_for_gpus() -> list[dict[str, Any]]:
    """Machine code for Ampere and Hopper, at the sizes of Wan2.1 and CogVideoX."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from dbsp_kernels.triton_forward import forward_kernel

    results = []
    for capability, width in ((80, 64), (90, 128)):
        tiles = {"BLOCK_Q": 64, "BLOCK_K": 64, "WIDTH": width, "TILE_Q": 64, "TILE_K": 64, "TILE_D": width}
        constants = {**tiles, "UPCAST": False}
        signature = {name: _type_of(name, constants) for name in forward_kernel.arg_names}
        source = ASTSource(forward_kernel, signature, constants)
        compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32))
        results.append({"sm": capability, "cubin": len(compiled.asm["cubin"]), "shared": compiled.metadata.shared})
    return results


def _type_of(name: str, constants: dict[str, Any]) -> str:
    if name in constants:
        return "constexpr"
    pointers = {"q_ptr": "*bf16", "k_ptr": "*bf16", "v_ptr": "*bf16", "out_ptr": "*bf16", "lse_ptr": "*fp32"}
    if name.endswith("_ptr"):
        return pointers.get(name, "*i32")
    return "fp32" if name == "scale_log2" else "i32"


if __name__ == "__main__":
    print(json.dumps(interpret() if sys.argv[1] == "interpret" else compile_for_gpus()))
