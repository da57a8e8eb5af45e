"""The variants of our attention and pooling kernels that a plan can meet, and how each is compiled."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
import triton
from triton.experimental.gluon import language as gl

from dbsp_kernels.prediction import pooling
from dbsp_kernels.triton.backward import backward_keys_kernel, backward_rows_kernel
from dbsp_kernels.triton.forward import forward_kernel
from dbsp_kernels.triton.hopper import stages_for
from dbsp_kernels.triton.pooling import sum_constants, sum_kernel
from dbsp_kernels.triton.tile_config import HOPPER, backward_tiles_for, padded, tiles_for
from dbsp_kernels.triton.warp_specialized import warp_specialized_kernel
from scripts.checks.machine_code.compiler import Compiled, compile_kernel
from scripts.checks.machine_code.reading import Step, findings

__all__ = ["DTYPES", "Variant", "examined", "failed", "reported", "shipped"]

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
MULTIPLES = {"q_row", "q_token", "k_block", "k_token", "v_block", "v_token"}
"""Strides, which are multiples of 16 at the usual widths."""


@dataclass(frozen=True)
class Variant:
    """arch: 90 for Hopper; width: D; partial: whether it merges into a partial result, as in a ring

    block_q, block_k: 0 where the code is the same for all
    """

    kernel: str
    arch: int
    block_q: int
    block_k: int
    width: int
    dtype: str
    partial: bool


def shipped(arch: int) -> Iterator[Variant]:
    """Everything that models here use: blocks of 64 and 128 in any mix, heads of 64 and 128, all dtypes."""
    for dtype, width, block_q, block_k, partial in itertools.product(
        DTYPES, (128, 64), (64, 128), (64, 128), (False, True)
    ):
        yield Variant("triton", arch, block_q, block_k, width, dtype, partial)
        if not partial:  # backward has no running result
            yield Variant("triton-dq", arch, block_q, block_k, width, dtype, partial)
            yield Variant("triton-dkv", arch, block_q, block_k, width, dtype, partial)
        if (arch, partial) == (HOPPER, False) and dtype != "fp32":
            yield Variant("triton-ws", arch, block_q, block_k, width, dtype, partial)
    for dtype, width in itertools.product(DTYPES, (128, 64)):
        yield Variant("sum-tokens", arch, 0, 0, width, dtype, False)


def _backward(variant: Variant) -> Compiled:
    kernel = {"triton-dq": backward_rows_kernel, "triton-dkv": backward_keys_kernel}[variant.kernel]
    both = backward_tiles_for(variant.block_q, variant.block_k, variant.width, DTYPES[variant.dtype])
    tiles = both[variant.kernel == "triton-dkv"]
    constants: dict[str, Any] = {
        "BLOCK_Q": variant.block_q, "BLOCK_K": variant.block_k, "WIDTH": variant.width,
        "TILE_Q": tiles.queries, "TILE_K": tiles.keys, "TILE_D": padded(variant.width), "UPCAST": False,
        "STAGES": tiles.stages,
    }  # fmt: skip
    types = {name: _type(name, variant.dtype) for name in kernel.arg_names}
    types |= dict.fromkeys(("k_ptr", "v_ptr", "dout_ptr"), f"*{variant.dtype}")
    types |= dict.fromkeys(("delta_ptr", "dq_ptr", "dk_ptr", "dv_ptr"), "*fp32") | {"scale": "fp32"}
    return compile_kernel(kernel, variant.arch, types, constants, set(), num_warps=tiles.warps, enable_fp_fusion=True)


def examined(variant: Variant) -> dict[str, Any]:
    """The variant and what was found of it, as one record. What is counted of a step is None where there is none."""
    found = asdict(findings(_compiled(variant), variant.arch))
    step = found.pop("step")
    counted = step or dict.fromkeys(field.name for field in fields(Step))
    return _named(variant) | counted | found | {"remark": "" if step else "no tensor cores"}


def reported(variant: Variant) -> dict[str, Any]:
    """The same, or why there is nothing to say of the variant."""
    try:
        return examined(variant)
    except Exception as error:  # whatever the compilers or the reading raise: the other variants don't depend on it
        return failed(variant, error)


def failed(variant: Variant, error: BaseException) -> dict[str, Any]:
    """The record of a variant that could not be compiled or read."""
    said = " ".join(str(error).split())
    return _named(variant) | {"remark": f"failed: {type(error).__name__}: {said}", "failed": True}


def _named(variant: Variant) -> dict[str, Any]:
    return {"triton": triton.__version__, **asdict(variant)}


def _compiled(variant: Variant) -> Compiled:
    compilers = {
        "triton": _pipelined, "triton-ws": _warp_specialized, "triton-dq": _backward, "triton-dkv": _backward,
        "sum-tokens": _summing,
    }  # fmt: skip
    return compilers[variant.kernel](variant)


def _summing(variant: Variant) -> Compiled:
    constants = sum_constants(variant.width, pooling.LIMIT, pooling.MEAN_UNIT, pooling.DIRECTION_UNIT)
    types = {name: "*i64" if name.endswith("_ptr") else "i32" for name in sum_kernel.arg_names}
    strides = {"batch_stride", "head_stride", "token_stride"}
    return compile_kernel(
        sum_kernel, variant.arch, types | {"tokens_ptr": f"*{variant.dtype}"}, constants | {"width_stride": 1},
        strides, enable_fp_fusion=False,
    )  # fmt: skip


def _warp_specialized(variant: Variant) -> Compiled:
    def descriptor(rows: int) -> str:
        dtype = gl.bfloat16 if variant.dtype == "bf16" else gl.float16
        layout = gl.NVMMASharedLayout.get_default_for([rows, variant.width], dtype)
        return f"tensordesc<{variant.dtype}[{rows}, {variant.width}],{layout!r}>"

    names = warp_specialized_kernel.arg_names
    types = {name: _type(name, variant.dtype) for name in names} | {"q_desc": descriptor(64)}
    types |= dict.fromkeys(("k_desc", "v_desc"), descriptor(variant.block_k))
    constants = {"PAIRED": variant.block_q == 64, "STAGES": stages_for(variant.block_k)}
    return compile_kernel(
        warp_specialized_kernel, variant.arch, types, constants, set(), num_warps=4, enable_fp_fusion=True
    )


def _pipelined(variant: Variant) -> Compiled:
    block_q, block_k, width, dtype = variant.block_q, variant.block_k, variant.width, variant.dtype
    tiles = tiles_for(block_q, block_k, width, DTYPES[dtype], variant.arch)
    use_tma = variant.arch >= HOPPER and dtype != "fp32"
    tile = f"tensordesc<{dtype}[{tiles.keys}, {padded(width)}]>" if use_tma else f"*{dtype}"
    types = {name: _type(name, dtype) for name in forward_kernel.arg_names} | {"k_source": tile, "v_source": tile}
    constants: dict[str, Any] = {
        "BLOCK_Q": block_q, "BLOCK_K": block_k, "WIDTH": width,
        "TILE_Q": tiles.queries, "TILE_K": tiles.keys, "TILE_D": padded(width),
        "USE_TMA": use_tma, "FULL_FIRST": True, "SHORT_ONLY": False, "RUNNING": variant.partial,
        "INTERPRET_FP32": False, "STAGES": tiles.stages,
    }  # fmt: skip
    return compile_kernel(
        forward_kernel, variant.arch, types, constants, MULTIPLES, num_warps=tiles.warps, enable_fp_fusion=True
    )


def _type(name: str, dtype: str) -> str:
    if name in ("q_ptr", "out_ptr"):
        return f"*{dtype}"
    if name.endswith("_ptr"):
        return "*fp32" if name.startswith("running") or "lse" in name else "*i32"
    return "fp32" if name == "scale_log2" else "i32"
