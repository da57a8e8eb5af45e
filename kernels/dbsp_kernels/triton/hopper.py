"""`triton-ws`: the launch of the warp-specialised kernel. By name only, until a GPU has shown it right and faster."""

from __future__ import annotations

from typing import Any

import torch

from dbsp_kernels.inputs import KernelInputs
from dbsp_kernels.merge import PartialAttention
from dbsp_kernels.triton.paired_rows import pair_rows

__all__ = ["hopper_attention", "launch_arguments", "stages_for"]

LOG2_E = 1.4426950408889634


def stages_for(block_k: int) -> int:
    """Slots of each ring: 192 KB of tiles at D 128, in addition to 32 KB of queries."""
    return 3 if block_k == 128 else 6


def hopper_attention(inputs: KernelInputs) -> PartialAttention:
    """The contract of `dbsp_kernels.block_attention`, without merging."""
    q = inputs.q
    out = torch.empty(q.shape, device=q.device, dtype=q.dtype)
    lse = torch.full(q.shape[:2], -torch.inf, device=q.device, dtype=torch.float32)
    if len(q) == 0 or len(inputs.k) == 0 or inputs.kv_index.shape[1] == 0:
        return out.zero_(), lse
    from dbsp_kernels.triton.warp_specialized import warp_specialized_kernel

    programs, arguments, constants = launch_arguments(inputs, out, lse)
    described = [_described(t, rows) for t, rows in zip(arguments[:3], (64, *[inputs.k.shape[1]] * 2), strict=True)]
    with torch.cuda.device(q.device):
        warp_specialized_kernel[(programs,)](
            *described, *arguments[3:], **constants, num_warps=4, enable_fp_fusion=True
        )
    return out, lse


def launch_arguments(
    inputs: KernelInputs, out: torch.Tensor, lse: torch.Tensor
) -> tuple[int, list[Any], dict[str, Any]]:
    """Returns the number of programs, the kernel's arguments with q, k and v as tensors, and its constants."""
    q, scale = inputs.positively_scaled()
    count, index, schedule = inputs.kv_count, inputs.kv_index.contiguous(), inputs.row_schedule
    full = torch.zeros_like(count) if inputs.kv_full is None else inputs.kv_full
    if schedule is None:
        schedule = torch.arange(len(q), dtype=torch.int32, device=q.device)
    paired = q.shape[1] == 64
    if paired:
        pairs = pair_rows(index, count, full, schedule)
        programs, tables = len(pairs.rows), [pairs.rows, pairs.list, pairs.tiles, pairs.turn]
    else:
        programs, tables = len(q), [schedule.contiguous(), index, count, index]
    arguments = [
        *(t.contiguous() for t in (q, inputs.k, inputs.v)), *tables, count, full, inputs.kv_len, out, lse,
        tables[1].shape[1], tables[3].shape[-1], scale * LOG2_E,
    ]  # fmt: skip
    return programs, arguments, {"PAIRED": paired, "STAGES": stages_for(inputs.k.shape[1])}


def _described(t: torch.Tensor, rows: int) -> Any:
    """The tensor [n, B, D] as a matrix [n · B, D], of which tiles of `rows` are copied at a time."""
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    dtype = gl.bfloat16 if t.dtype == torch.bfloat16 else gl.float16
    tile = [rows, t.shape[-1]]
    return TensorDescriptor.from_tensor(t.flatten(0, 1), tile, gl.NVMMASharedLayout.get_default_for(tile, dtype))
