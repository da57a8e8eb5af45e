"""Sizes that are measured, quick or thorough, and the whole attentions that are held out."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dbsp_core.masks.block_mask import BlockMask
from dbsp_core.masks.grid import BlockGrid

__all__ = ["Case", "Sizes", "held_out", "sizes_for", "uneven_mask"]


def uneven_mask(heads: int, grid: BlockGrid, density: float, seed: int = 0, slope: float = 0.5) -> BlockMask:
    """Makes random blocks; heads, rows and columns grow denser from first to last, so contiguous plans are uneven.

    Args:
        density: In the middle.
        slope: The last is (1 + slope) times as dense as the middle, the first (1 − slope) times.
    """
    rng = np.random.default_rng(seed)
    bits = np.empty((heads, grid.nq, grid.nk), dtype=bool)
    head, row, column = (np.linspace(1 - slope, 1 + slope, n, dtype=np.float32) for n in bits.shape)
    for h in range(heads):
        odds = density * head[h] * row[:, None] * column
        bits[h] = rng.random(bits.shape[1:], dtype=np.float32) < odds
    return BlockMask(bits, grid)  # type: ignore[arg-type]  # numpy is taken too


@dataclass(frozen=True)
class Case:
    """One attention over `tokens` tokens under an uneven mask."""

    heads: int
    tokens: int
    head_dim: int
    density: float
    block: int = 64
    seed: int = 0
    slope: float = 0.5

    def mask(self) -> BlockMask:
        return uneven_mask(self.heads, BlockGrid.uniform(self.tokens, self.block), self.density, self.seed, self.slope)


@dataclass(frozen=True)
class Sizes:
    """The samples of each part.

    Attributes:
        compute: Attentions of which only the kernel runs.
        call: Attentions without a dense block, for packing.
        overlap: Attentions in a ring.
        transfers: Bytes that a rank sends.
        merges: Output elements.
        linear: (rows, width) of matrix products.
    """

    compute: tuple[Case, ...]
    call: tuple[Case, ...]
    overlap: tuple[Case, ...]
    transfers: tuple[int, ...]
    merges: tuple[int, ...]
    linear: tuple[tuple[int, int], ...]
    repeats: int


def sizes_for(device: str, quick: bool) -> Sizes:
    """Returns thorough sizes, about two minutes on two ranks of a CPU, or quick ones, a few seconds."""
    if quick:
        small = (Case(2, 512, 32, 0.3), Case(2, 512, 64, 0.6), Case(4, 768, 32, 0.4, seed=1), Case(2, 768, 64, 0.1))
        return Sizes(small, small[:2], small[1:3], (1 << 14, 1 << 18), (1 << 12, 1 << 16), ((128, 128),), 3)
    scale, heads = (16, 8) if device == "cuda" else (1, 4)
    compute = tuple(
        Case(heads, tokens * scale, head_dim, density, block, seed)
        for seed, (tokens, head_dim, density, block) in enumerate(
            (
                (1024, 64, 0.2, 64),
                (1024, 128, 0.6, 64),
                (2048, 64, 0.1, 64),
                (2048, 64, 0.4, 64),
                (2048, 128, 0.2, 64),
                (2048, 64, 0.5, 128),
                (3072, 64, 0.3, 64),
                (3072, 32, 0.3, 64),
                (3072, 128, 0.05, 64),
            )
        )
    )
    call = tuple(Case(heads, t * scale, d, 0.0) for t, d in ((1024, 64), (3072, 64), (4096, 128), (8192, 128)))
    overlap = tuple(Case(heads, t * scale, d, p) for t, d, p in ((2048, 64, 0.05), (3072, 128, 0.05), (4096, 64, 0.1)))
    transfers = (1 << 12, 1 << 18, 1 << 20, 1 << 22, 1 << 24) + ((1 << 26, 1 << 28) if device == "cuda" else ())
    merges = tuple(n * scale for n in (1 << 16, 1 << 18, 1 << 20))
    return Sizes(compute, call, overlap, transfers, merges, ((1024 * scale, 1024), (2048 * scale, 1536)), 15)


def held_out(device: str, quick: bool) -> tuple[Case, ...]:
    """Shapes that no sample has, for --check."""
    if quick:
        return (Case(3, 640, 48, 0.35, seed=7),)
    scale = 16 if device == "cuda" else 1
    return (
        Case(12, 1536 * scale, 64, 0.3, seed=11),
        Case(6, 2560 * scale, 96, 0.25, seed=12),
        Case(5, 4000 * scale, 64, 0.15, seed=13),
        Case(12, 2560 * scale, 64, 0.5, seed=14, slope=0.3),
        Case(8, 1984 * scale, 128, 0.35, seed=15),
    )
