"""Triton kernels that merge partial results: one into another in place, and the parts of cut rows."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dbsp_kernels.triton.launch import launch
from dbsp_kernels.triton.tiles import padded

ELEMENTS = 4096  # of out, per program


@triton.jit(do_not_specialize=("lse_ptr", "part_lse_ptr", "tokens", "lse_item"))
def merge_kernel(  # type: ignore[no-untyped-def]
    out_ptr, lse_ptr, part_ptr, part_lse_ptr, tokens, out_item, lse_item,
    HEAD_DIM: tl.constexpr, TILE: tl.constexpr, TILE_D: tl.constexpr,
):  # fmt: skip
    """Merges TILE tokens of one item per program, by lse and part_lse float32, natural log.

    out [items, tokens, HEAD_DIM] and lse [items, tokens] are contiguous within an item, out_item and lse_item elements
    apart; part [items, tokens, HEAD_DIM] and part_lse [items, tokens] are contiguous.
    """
    item = tl.program_id(1).to(tl.int64)
    token = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    dims = tl.arange(0, TILE_D)
    there = token < tokens
    inside = there[:, None] & (dims[None, :] < HEAD_DIM)
    at = token[:, None] * HEAD_DIM + dims[None, :]
    out_ptr += item * out_item
    lse_ptr += item * lse_item
    part_ptr += item * tokens * HEAD_DIM
    part_lse_ptr += item * tokens
    lse = tl.load(lse_ptr + token, mask=there, other=0.0)
    part_lse = tl.load(part_lse_ptr + token, mask=there, other=0.0)
    out = tl.load(out_ptr + at, mask=inside, other=0.0).to(tl.float32)
    part = tl.load(part_ptr + at, mask=inside, other=0.0).to(tl.float32)
    top = tl.maximum(lse, part_lse)
    top = tl.where(top == float("-inf"), 0.0, top)  # no keys on either side: −inf − −inf would be NaN
    share, part_share = tl.exp(lse - top), tl.exp(part_lse - top)
    total = share + part_share
    lse = top + tl.log(total)
    total = tl.where(total == 0.0, 1.0, total)
    out = out * (share / total)[:, None] + part * (part_share / total)[:, None]
    tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=inside)
    tl.store(lse_ptr + token, lse, mask=there)


def triton_merge_into(out: torch.Tensor, lse: torch.Tensor, out_part: torch.Tensor, lse_part: torch.Tensor) -> None:
    """Implements the contract of `dbsp_kernels.merge_into`; parts are contiguous, out and lse within each item."""
    if lse.numel() == 0:
        return
    head_dim, items = out.shape[-1], 1 if out.is_contiguous() and lse.is_contiguous() else len(lse)
    tokens, tile = lse.numel() // items, max(1, ELEMENTS // padded(head_dim))
    launch(
        merge_kernel, (-(-tokens // tile), items),
        out, lse, out_part, lse_part, tokens, out.stride(0) if items > 1 else tokens * head_dim, lse.stride(0),
        HEAD_DIM=head_dim, TILE=tile, TILE_D=padded(head_dim), num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip


@triton.jit(do_not_specialize=("part_lse_ptr", "cuts_ptr", "lse_ptr", "running_lse_ptr"))
def merge_parts_kernel(  # type: ignore[no-untyped-def]
    part_ptr, part_lse_ptr, cuts_ptr, out_ptr, lse_ptr, running_ptr, running_lse_ptr,
    BLOCK_Q: tl.constexpr, HEAD_DIM: tl.constexpr, TILE: tl.constexpr, TILE_D: tl.constexpr, RUNNING: tl.constexpr,
):  # fmt: skip
    """Merges TILE queries of one row per program: running if RUNNING, then its parts in ascending order."""
    cut = cuts_ptr + tl.program_id(0) * 3
    parts = tl.load(cut + 2)
    if parts == 0:  # unused cut
        return
    query, dims = tl.program_id(1) * TILE + tl.arange(0, TILE), tl.arange(0, TILE_D)
    there = query < BLOCK_Q
    inside = there[:, None] & (dims[None, :] < HEAD_DIM)
    at_row = tl.load(cut).to(tl.int64) * BLOCK_Q + query
    out, top = tl.zeros([TILE, TILE_D], tl.float32), tl.full([TILE], float("-inf"), tl.float32)
    total = tl.zeros([TILE], tl.float32)
    if RUNNING:
        top = tl.load(running_lse_ptr + at_row, mask=there, other=float("-inf"))
        total = tl.where(top == float("-inf"), 0.0, 1.0)
        out = tl.load(running_ptr + at_row[:, None] * HEAD_DIM + dims[None, :], mask=inside, other=0.0).to(tl.float32)
    first = tl.load(cut + 1).to(tl.int64) * BLOCK_Q
    for part in range(parts):
        at = first + part * BLOCK_Q + query
        lse = tl.load(part_lse_ptr + at, mask=there, other=float("-inf"))
        new_top = tl.maximum(top, lse)
        finite = tl.where(new_top == float("-inf"), 0.0, new_top)
        kept, share = tl.exp(top - finite), tl.exp(lse - finite)
        of_part = tl.load(part_ptr + at[:, None] * HEAD_DIM + dims[None, :], mask=inside, other=0.0)
        out, total, top = out * kept[:, None] + of_part * share[:, None], total * kept + share, new_top
    total = tl.where(total == 0.0, 1.0, total)  # no keys: top is −inf
    lse = top + tl.log(total)
    out = out / total[:, None]
    tl.store(out_ptr + at_row[:, None] * HEAD_DIM + dims[None, :], out.to(out_ptr.dtype.element_ty), mask=inside)
    tl.store(lse_ptr + at_row, lse, mask=there)


def triton_merge_parts(
    out: torch.Tensor,
    lse: torch.Tensor,
    part: torch.Tensor,
    part_lse: torch.Tensor,
    cuts: torch.Tensor,
    partial: tuple[torch.Tensor, torch.Tensor] | None,
) -> None:
    """Writes the cut rows of out [R, Bq, D] and lse [R, Bq], merging their parts and `partial` unless None.

    Parts are float32[places, Bq, D] and [places, Bq] as `RowParts` numbers them; `partial` may be `out` and `lse`.
    """
    (_, block_q, head_dim), (running, running_lse) = out.shape, partial or (out, lse)
    tile = min(padded(block_q), max(1, ELEMENTS // padded(head_dim)))
    launch(
        merge_parts_kernel, (cuts.shape[0], -(-block_q // tile)),
        part, part_lse, cuts, out, lse, running, running_lse,
        BLOCK_Q=block_q, HEAD_DIM=head_dim, TILE=tile, TILE_D=padded(head_dim), RUNNING=partial is not None,
        num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip
