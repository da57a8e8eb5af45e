"""Masks to measure with: as uneven as one asks for."""

from __future__ import annotations

import numpy as np

from dbsp_core.grid import BlockGrid
from dbsp_core.mask import BlockMask

__all__ = ["uneven_mask"]


def uneven_mask(heads: int, grid: BlockGrid, density: float, seed: int = 0, slope: float = 0.5) -> BlockMask:
    """Random blocks; heads, rows and columns grow denser from first to last, so that contiguous plans are uneven.

    density: in the middle; slope: the last is (1 + slope) times as dense, the first (1 − slope)
    """
    rng = np.random.default_rng(seed)
    bits = np.empty((heads, grid.nq, grid.nk), dtype=bool)
    head, row, column = (np.linspace(1 - slope, 1 + slope, n, dtype=np.float32) for n in bits.shape)
    for h in range(heads):
        odds = density * head[h] * row[:, None] * column
        bits[h] = rng.random(bits.shape[1:], dtype=np.float32) < odds
    return BlockMask(bits, grid)  # type: ignore[arg-type]  # numpy is taken too
