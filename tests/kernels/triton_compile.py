"""Run in a process of its own: compiles the Triton kernels for GPUs that are not here, at the sizes of Wan2.1 and
CogVideoX, and prints as JSON what of the machine code matters."""

from __future__ import annotations

import itertools
import json
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from dbsp_kernels.triton.forward import forward_kernel
from dbsp_kernels.triton.merge import merge_kernel
from dbsp_kernels.triton.tile_config import padded, tiles_for

POINTERS = {"q_ptr": "*bf16", "out_ptr": "*bf16", "part_ptr": "*bf16", "running_ptr": "*fp32"}
STRIDES = {"q_row", "q_token", "k_block", "k_token", "v_block", "v_token"}  # multiples of 16, as they are with D = 64


def compile_for(capability: int, kernel: Any, constants: dict[str, Any], **options: int) -> dict[str, Any]:
    copies = constants.get("USE_TMA", False)
    signature, aligned = {}, {}
    for position, name in enumerate(kernel.arg_names):
        signature[name] = "constexpr" if name in constants else _type_of(name)
        if name.endswith("_source"):
            tile = f"{constants['TILE_K']}, {constants['TILE_D']}"
            signature[name] = f"tensordesc<bf16[{tile}]>" if copies else "*bf16"
        if name in STRIDES or "*" in signature[name]:
            aligned[(position,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, aligned)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    assembly = compiled.asm["ptx"]
    return {
        "kernel": kernel.__name__,
        "sm": capability,
        "tiles": [constants.get("TILE_Q"), constants.get("TILE_K")],
        "cubin": len(compiled.asm["cubin"]),
        "shared": compiled.metadata.shared,
        "wgmma": "wgmma.mma_async" in assembly,
        "bulk_copies": "cp.async.bulk.tensor" in assembly,
    }


def _type_of(name: str) -> str:
    if name.endswith("_ptr"):
        return POINTERS.get(name, "*fp32" if "lse" in name else "*i32")
    return "fp32" if name == "scale_log2" else "i32"


def forward(capability: int, block_q: int, block_k: int, width: int, running: bool) -> dict[str, Any]:
    tiles = tiles_for(block_q, block_k, width, torch.bfloat16, capability)
    constants = {
        "BLOCK_Q": block_q, "BLOCK_K": block_k, "WIDTH": width,
        "TILE_Q": tiles.queries, "TILE_K": tiles.keys, "TILE_D": padded(width),
        "USE_TMA": capability >= 90, "FULL_FIRST": True, "RUNNING": running, "INTERPRET_FP32": False,
        "STAGES": tiles.stages,
    }  # fmt: skip
    return compile_for(capability, forward_kernel, constants, num_warps=tiles.warps)


if __name__ == "__main__":
    sizes = [(90, q, k, 128, q == k) for q, k in itertools.product((64, 128), repeat=2)]
    results = [forward(*size) for size in (*sizes, (80, 64, 64, 64, False), (80, 128, 64, 128, True))]
    results += [compile_for(sm, merge_kernel, {"WIDTH": 128, "TILE": 32, "TILE_D": 128}) for sm in (80, 90)]
    print(json.dumps(results))
