"""From bits to the kernel's table, as a Triton kernel: one pass over the bits, one write of the table."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

__all__ = ["expand_kernel", "triton_expand_rows"]

CHUNK = 1024  # columns at a time


@triton.jit
def expand_kernel(  # type: ignore[no-untyped-def]
    bits_ptr, base_ptr, length_ptr, full_ptr, index_ptr, rows, row_bytes, width, block, blocks, CHUNK: tl.constexpr
):
    """One program, one row of one copy: full blocks from its first place on, short ones behind them."""
    row = tl.program_id(0).to(tl.int64)
    copy = tl.program_id(1)
    base = tl.load(base_ptr + row)
    index_row = index_ptr + (copy * rows + row) * width
    full_place = 0
    short_place = tl.load(full_ptr + row)
    for start in range(0, width, CHUNK):
        column = start + tl.arange(0, CHUNK)
        byte = tl.load(bits_ptr + row * row_bytes + column // 8, mask=column < width, other=0).to(tl.int32)
        needed = (byte >> (column % 8)) & 1
        length = tl.load(length_ptr + base + column, mask=needed != 0, other=0)
        full = tl.where(length == block, needed, 0)
        short = needed - full
        place = tl.where(full != 0, full_place + tl.cumsum(full, 0), short_place + tl.cumsum(short, 0)) - 1
        tl.store(index_row + place, base + column + copy * blocks, mask=needed != 0)
        full_place += tl.sum(full, 0)
        short_place += tl.sum(short, 0)


def triton_expand_rows(
    bits: torch.Tensor,
    base: torch.Tensor,
    kv_len: torch.Tensor,
    kv_full: torch.Tensor,
    width: int,
    block: int,
    batch: int,
) -> torch.Tensor:
    """The contract of `dbsp_kernels.packing.row_bits.expand_rows`."""
    rows = len(bits)
    index = torch.empty(batch * rows, width, dtype=torch.int32, device=bits.device)
    if index.numel():
        expand_kernel[(rows, batch)](
            bits, base, kv_len, kv_full, index, rows, bits.shape[1], width, block, len(kv_len),
            CHUNK=CHUNK, num_warps=4,
        )  # fmt: skip
    return index
