"""Masks written as lists of blocks: each row of blocks names the key blocks it computes."""

from __future__ import annotations

import torch

from dbsp_core.errors import UserError

__all__ = ["ENCODINGS", "lut_bits"]

ENCODINGS = ("absolute", "delta")
"""absolute: the key blocks' numbers. delta: the first one's number, then each one's distance to the one before it, as
SpargeAttn's kernels and the official db-SP scripts have it."""


def lut_bits(lut: torch.Tensor, counts: torch.Tensor | None, encoding: str, nk: int) -> torch.Tensor:
    """bool[H, nq, nk] of integer lists [H, nq, width].

    counts: int[H, nq], how many entries of each row count; without them all do that name a block (0 ≤ block < nk), so
            that lists padded with −1, nk or, in delta, zeros are read right; only an empty row of zeros cannot be told
            from block 0
    Raises ValueError for entries that count but name no block, for counts out of range, or for no integers.
    """
    if lut.dtype.is_floating_point or lut.dtype == torch.bool:
        raise UserError(f"lists of blocks must be integers, got {lut.dtype}")
    heads, rows, width = lut.shape
    blocks = lut.long()
    place = torch.arange(width)
    if counts is not None:
        if int(counts.min()) < 0 or int(counts.max()) > width:
            raise UserError(f"counts must lie between 0 and {width}, found {int(counts.min())} to {int(counts.max())}")
        valid = place < counts.long()[..., None]
        blocks = blocks.masked_fill(~valid, 0)
    else:
        padding = blocks < 0
        valid = padding.cumsum(dim=-1) == 0 if encoding == "delta" else ~padding
        blocks = blocks.masked_fill(~valid, 0)
    if encoding == "delta":
        blocks = blocks.cumsum(dim=-1)
    named = (blocks >= 0) & (blocks < nk)
    if counts is not None and bool((valid & ~named).any()):
        beyond = int(blocks[valid & ~named][0])
        other = "absolute" if encoding == "delta" else "delta"
        raise UserError(
            f"the lists name block {beyond}, there are {nk} key blocks; are they {other} (--lut {other}), or "
            "tokens or block_k others?"
        )
    bits = torch.zeros(heads, rows, nk + 1, dtype=torch.bool)
    bits.scatter_(2, torch.where(valid & named, blocks, nk), True)
    return bits[..., :nk]
