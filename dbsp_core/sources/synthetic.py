"""Seeded synthetic masks: heads of uneven density, profiles that heads share, a dense diagonal."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from dbsp_core.mask import BlockMask
from dbsp_core.sources.base import MaskRequest
from dbsp_core.sources.blocks import BlockSizes

__all__ = ["SyntheticSource"]


@dataclass(frozen=True)
class SyntheticSource(BlockSizes):
    """density: mean share of dense blocks; spread: how much heads, rows and columns differ (0 not at all, 1 a lot).

    Row and column profiles are shared by the heads of a layer: independent heads would average out, and rings would
    look balanced when they are not. Each layer has masks of its own, made from `seed` and the layer alone.
    """

    density: float = 0.4
    spread: float = 0.6
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, value in (("density", self.density), ("spread", self.spread)):
            if not 0 <= value <= 1:
                raise ValueError(f"{name}={value} must lie between 0 and 1")

    def mask(self, request: MaskRequest) -> BlockMask:
        grid = self.grid(request)
        rng = np.random.default_rng([self.seed, request.layer])
        head = 1 + self.spread * rng.uniform(-1, 1, request.heads)
        row = self._profile(grid.nq, rng)
        column = self._profile(grid.nk, rng)
        wanted = self.density * head[:, None, None] * row[None, :, None] * column[None, None, :]
        for _ in range(20):  # shares end at 1: what that cuts off goes to the others
            wanted = np.minimum(wanted * (self.density / max(wanted.mean(), 1e-12)), 1.0)
            if wanted.mean() >= 0.995 * self.density:
                break
        bits = rng.random(wanted.shape) < wanted
        diagonal = np.arange(grid.nq) * grid.nk // grid.nq
        bits[:, np.arange(grid.nq), diagonal] = True
        return BlockMask(torch.from_numpy(bits), grid)

    def _profile(self, blocks: int, rng: np.random.Generator) -> np.ndarray:
        """float[blocks] of mean about 1: a slow wave along the sequence, as scenes have, and some noise."""
        wave = np.interp(np.linspace(0, 4, blocks), np.arange(5), rng.uniform(-1, 1, 5))
        return 1 + self.spread * (0.8 * wave + 0.2 * rng.uniform(-1, 1, blocks))
