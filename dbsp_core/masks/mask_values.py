"""The values of one mask in a mask file: its bits, one or eight in a byte, sequence after sequence."""

from __future__ import annotations

import numpy as np
import torch

from dbsp_core.masks.block_mask import BlockMask
from dbsp_core.masks.grid import BlockGrid
from dbsp_core.masks.token_order import CANONICAL

__all__ = ["block_counts", "head_values", "mask_bits", "mask_values", "pack_mask_bits", "unpack_mask_bits"]


def block_counts(grid: BlockGrid) -> tuple[int, int]:
    """(nq, nk), computed without the grid's arrays, as a file's numbers may be absurd."""
    segments = [part for one in grid.sequences for part in (one.text_tokens, one.tokens - one.text_tokens)]
    nq, nk = (sum(-(-segment // block) for segment in segments) for block in (grid.block_q, grid.block_k))
    return nq, nk


def head_values(grid: BlockGrid, packed: bool) -> int:
    """Number of values that a file has for one head."""
    counts = map(block_counts, grid.sequences)
    return sum(nq * (-(-nk // 8) if packed else nk) for nq, nk in counts)


def pack_mask_bits(bits: torch.Tensor) -> np.ndarray:
    """uint8[..., nq, ceil(nk / 8)] of bool[..., nq, nk]: the first of eight blocks is the most significant bit."""
    return np.packbits(bits.cpu().numpy(), axis=-1)


def unpack_mask_bits(packed: np.ndarray, nk: int) -> torch.Tensor:
    """bool[..., nq, nk]: the inverse of `pack_mask_bits`. Bits beyond the last block are ignored."""
    return torch.from_numpy(np.unpackbits(packed, axis=-1, count=nk).view(bool))


def mask_values(bits: torch.Tensor, grid: BlockGrid, packed: bool) -> np.ndarray:
    """uint8, the values of a `BlockMask`'s bits; in one dimension for packed sequences."""
    parts = BlockMask(bits, grid.with_orders((CANONICAL,))).parts
    values = [pack_mask_bits(part.bits) if packed else part.bits.cpu().to(torch.uint8).numpy() for part in parts]
    return np.concatenate([one.ravel() for one in values]) if grid.packed_from else values[0]


def mask_bits(values: np.ndarray, grid: BlockGrid, heads: int, packed: bool) -> torch.Tensor:
    """The bits of a `BlockMask`: the inverse of `mask_values`."""
    if not packed:
        return torch.from_numpy(values).bool()
    if not grid.packed_from:
        return unpack_mask_bits(values, grid.nk)
    sizes = [heads * head_values(one, packed=True) for one in grid.sequences]
    pieces = zip(np.split(values, np.cumsum(sizes)[:-1]), grid.sequences, strict=True)
    return torch.cat([unpack_mask_bits(own.reshape(-1, -(-one.nk // 8)), one.nk).flatten() for own, one in pieces])
