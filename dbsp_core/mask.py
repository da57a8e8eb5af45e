"""Block masks on a grid."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from dbsp_core.counting import MaskCounts
from dbsp_core.errors import UserError
from dbsp_core.grid import BlockGrid

__all__ = ["BlockMask"]


@dataclass(frozen=True, eq=False)
class BlockMask:
    """Which (query block, key block) pairs each head computes.

    bits: bool[H, nq, nk], a tensor on any device or a numpy array; True is a dense block. Rows may be empty.
    Raises ValueError when the shape does not fit the grid.
    """

    bits: torch.Tensor
    grid: BlockGrid

    def __post_init__(self) -> None:
        bits = torch.as_tensor(self.bits)
        if bits.dtype != torch.bool:
            raise UserError(f"mask bits must be bool, got {bits.dtype}; compare with a threshold first")
        expected = (self.grid.nq, self.grid.nk)
        if bits.ndim != 3 or tuple(bits.shape[1:]) != expected or bits.shape[0] < 1:
            raise UserError(
                f"mask of shape {tuple(bits.shape)} does not fit {self.grid.tokens} tokens in blocks of "
                f"{self.grid.block_q}×{self.grid.block_k}: expected [heads, {expected[0]}, {expected[1]}]"
            )
        if len(self.grid.orders) not in (1, bits.shape[0]):
            raise UserError(
                f"the grid has token orders for {len(self.grid.orders)} heads, the mask {bits.shape[0]} heads"
            )
        object.__setattr__(self, "bits", bits)

    @classmethod
    def dense(cls, heads: int, grid: BlockGrid) -> BlockMask:
        """Every block of every head."""
        return cls(torch.ones(heads, grid.nq, grid.nk, dtype=torch.bool), grid)

    @property
    def heads(self) -> int:
        return int(self.bits.shape[0])

    @property
    def density(self) -> float:
        """Share of blocks that are dense."""
        return int(self.bits.sum()) / self.bits.numel()

    @cached_property
    def fingerprint(self) -> int:
        """63 bits that differ between masks, to compare ranks by."""
        digest = hashlib.blake2b(str(self.grid).encode(), digest_size=8)
        for head in self.bits:
            digest.update(np.packbits(head.cpu().numpy()).tobytes())
        return int.from_bytes(digest.digest(), "big") >> 1

    def refined(self, grid: BlockGrid) -> BlockMask:
        """The same mask on a grid whose blocks are parts of this one's. Raises ValueError when they are not."""
        old, new = self.grid, grid
        if old == new:
            return self
        if not new.refines(old):
            raise UserError(f"the blocks of {new} are not parts of those of {old}")
        rows = torch.from_numpy(old.q_axis.block_of[new.q_axis.starts]).to(self.bits.device)
        columns = torch.from_numpy(old.k_axis.block_of[new.k_axis.starts]).to(self.bits.device)
        return BlockMask(self.bits[:, rows][:, :, columns], grid)

    @cached_property
    def counts(self) -> MaskCounts:
        """Dense blocks by row, column and slot."""
        return MaskCounts(self.bits)
