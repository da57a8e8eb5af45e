"""The blocks that each row attends to as bits (a kernel's table takes four bytes per block), and their expansion."""

from __future__ import annotations

import functools

import torch


def pack_bits(needed: torch.Tensor) -> torch.Tensor:
    """Packs bool[..., W] → uint8[..., ceil(W / 8)]: column 8·i + j is bit j of byte i."""
    width, bits = needed.shape[-1], needed.to(torch.uint8)
    if width % 8:
        bits = torch.nn.functional.pad(bits, (0, -width % 8))
    bits = bits.view(*bits.shape[:-1], -(-width // 8), 8)
    return (bits << _bit_positions(needed.device)).sum(-1, dtype=torch.uint8)


def unpack_bits(packed: torch.Tensor, width: int) -> torch.Tensor:
    """Unpacks `pack_bits` to bool[..., W]; rows are not contiguous if W is not a multiple of 8."""
    bits = (packed.unsqueeze(-1) >> _bit_positions(packed.device)).bitwise_and_(1)
    flat = bits.view(torch.bool).flatten(-2)
    return flat if flat.shape[-1] == width else flat[..., :width]


@functools.cache
def _bit_positions(device: torch.device) -> torch.Tensor:
    """Returns uint8[8]: each bit's position in a byte."""
    return torch.arange(8, dtype=torch.uint8, device=device)


def pack_rows(
    mask: torch.Tensor,
    rows: torch.Tensor,
    spans: torch.Tensor,
    columns: torch.Tensor,
    present: torch.Tensor,
    full: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Packs and counts the mask bits of a rank's rows for all chunks of keys at once.

    A span is a head or one sequence of a head; rows of a span share the meaning of columns.

    Args:
        mask: bool[n, nk] rows; or bool[n], rows of several lengths one after another.
        rows, spans: int64[R], each row's position in `mask` (in bool[n]: of its first bit) and its span.
        columns: int64[y, spans, width], KV block of each column, as an index into the mask's row.
        present, full: bool[y, spans, width], True if the column has a block, and if that block is full.

    Returns:
        Bits uint8[y, R, ceil(width / 8)]; int32[y, R] each row's number of blocks, and of full blocks.
    """
    if mask.is_cuda:
        from dbsp_kernels.triton.tables import triton_pack_rows  # here: triton need not be installed

        return triton_pack_rows(mask, rows, spans, columns, present, full)
    if mask.ndim == 1:
        needed = mask[rows[:, None] + columns[:, spans]] & present[:, spans]
    else:
        of_rows = mask.index_select(0, rows).expand(len(columns), -1, -1)
        needed = of_rows.gather(2, columns[:, spans]) & present[:, spans]
    count, whole = (bits.sum(dim=2, dtype=torch.int32) for bits in (needed, needed & full[:, spans]))
    return pack_bits(needed), count, whole


def expand_rows(
    bits: torch.Tensor,
    base: torch.Tensor,
    kv_len: torch.Tensor,
    bounds: torch.Tensor,
    kv_full: torch.Tensor,
    width: int,
    block: int,
    batch: int = 1,
) -> torch.Tensor:
    """Builds the tables of `block_attention` for all chunks of keys at once, without host synchronization.

    Args:
        bits: uint8[y, R, ceil(width / 8)]: row r attends to packed block base[r] + j of the chunk if bit j is set.
        base: int32[y, R].
        kv_len: int32[ΣCk], lengths of all chunks' blocks; rows list blocks shorter than `block` last.
        bounds: int32[y + 1], start of each chunk's blocks, and the end of the last.
        kv_full: int32[y, R], number of full blocks per row.

    Returns:
        kv_index int32[y, batch · R, width]; the b-th copy of the rows attends to the b-th copy of the chunk's Ck
        blocks. Entries beyond a row's count are undefined.
    """
    if bits.is_cuda:
        from dbsp_kernels.triton.tables import triton_expand_rows  # here: triton need not be installed

        return triton_expand_rows(bits, base, kv_len, bounds, kv_full, width, block, batch)
    chunks, rows, _ = bits.shape
    column = torch.arange(width, device=bits.device)
    needed = (bits[:, :, column // 8] >> (column % 8).to(torch.uint8) & 1).bool()
    packed, first = base[..., None] + column, bounds[:-1, None, None]
    short = kv_len[torch.where(needed, packed + first, 0).long()] < block if len(kv_len) else torch.zeros_like(needed)
    position = torch.where(short, kv_full[..., None] + (needed & short).cumsum(2) - 1, (needed & ~short).cumsum(2) - 1)
    # Unneeded columns go to an extra entry, dropped below.
    index = torch.zeros(chunks, rows, width + 1, dtype=torch.int32, device=bits.device)
    index.scatter_(2, torch.where(needed, position, width).long(), packed.to(torch.int32))
    copies = torch.arange(batch, dtype=torch.int32, device=bits.device)[:, None] * bounds.diff()[:, None, None]
    return (index[:, None, :, :width] + copies[..., None]).flatten(1, 2)
