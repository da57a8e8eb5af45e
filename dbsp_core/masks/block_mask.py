"""Counting the dense blocks of a mask, on the device where its bits are; what planners look at."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from dbsp_core.masks.grid import BlockGrid
from dbsp_core.utils.errors import UserError

__all__ = ["BlockMask", "MaskCounts"]

SUM = torch.float32  # exact: sums stay below 2**24
REMEMBERED = 4  # assignments of slots whose counts are kept: a planner's own, the baseline's, and those before


class MaskCounts:
    """Counts of bits bool[H, nq, nk], head by head: as numbers to add up, a head takes several times its bits.

    Each is made once, or by each of several threads that ask at the same time; every thread gets its own.
    """

    def __init__(self, bits: torch.Tensor) -> None:
        self._bits = bits
        self._cells: list[tuple[int, np.ndarray, np.ndarray]] = []
        self._sums: tuple[np.ndarray, np.ndarray] | None = None

    @property
    def rows(self) -> np.ndarray:
        """int64[H, nq]: dense blocks per (head, query block), the work of each row."""
        return self._summed()[0]

    @property
    def columns(self) -> np.ndarray:
        """int64[H, nk]: rows that need each (head, KV block)."""
        return self._summed()[1]

    def _summed(self) -> tuple[np.ndarray, np.ndarray]:
        if self._sums is None:
            # A GPU adds up single bytes as fast as it reads them, which a CPU does not.
            heads = self._bits if self._bits.is_cuda else map(self._widened, self._bits)
            pairs = [(head.sum(dim=1, dtype=SUM), head.sum(dim=0, dtype=SUM)) for head in heads]
            rows, columns = zip(*pairs, strict=True)
            self._sums = _integers(torch.stack(rows)), _integers(torch.stack(columns))
        return self._sums

    def work_by_slot(self, slots: np.ndarray, ring: int) -> np.ndarray:
        """int[H, nq, ring]: dense blocks of each row by the ring slot its keys travel in. slots: int[H, nk]

        In 32 bits, as planners read them many times.
        """
        if ring == 1:
            return self.rows[:, :, None]
        known = self._known(slots, ring)
        return self._counted([slots], ring)[0] if known is None else known

    def count(self, many: Sequence[np.ndarray], ring: int) -> None:
        """Prepares `rows`, `columns` and `work_by_slot` for each of these slots, in one pass over the bits."""
        missing = [slots for slots in many if self._known(slots, ring) is None]
        if ring > 1 and missing:
            self._counted(missing, ring)

    def _counted(self, missing: Sequence[np.ndarray], ring: int) -> list[np.ndarray]:
        """The cells of each of these slots, counted and remembered."""
        device, width = self._bits.device, ring * len(missing)
        wanted = torch.from_numpy(np.concatenate([s + ring * n for n, s in enumerate(missing)], axis=1)).to(device)
        to_slot = torch.nn.functional.one_hot(wanted, width).unflatten(1, (len(missing), -1)).sum(dim=1)
        cells, columns, summed = [], [], self._sums is not None
        for head, one_hot in zip(self._bits, to_slot, strict=True):
            wide = self._widened(head)
            cells.append(wide @ one_hot.to(wide.dtype))
            if not summed:
                columns.append(wide.sum(dim=0, dtype=SUM))
        # Slot by slot in memory: what is summed over rows is one slot's counts.
        by_slot = torch.stack(cells).permute(2, 0, 1).int().contiguous().cpu().numpy().transpose(1, 2, 0)
        counted = np.split(by_slot, len(missing), axis=2)
        if not summed:
            self._sums = np.ascontiguousarray(counted[0].sum(axis=2, dtype=np.int64)), _integers(torch.stack(columns))
        found = [(ring, slots.copy(), one) for slots, one in zip(missing, counted, strict=True)]
        self._cells = [*found, *self._cells][:REMEMBERED]
        return counted

    def _known(self, slots: np.ndarray, ring: int) -> np.ndarray | None:
        """Cells that were counted before."""
        found = (cells for r, known, cells in self._cells if r == ring and np.array_equal(known, slots))
        return next(found, None)

    def _widened(self, head: torch.Tensor) -> torch.Tensor:
        """Ones and zeros to add up: in 16 bits, products are exact below 2**11."""
        small = head.is_cuda and max(head.shape) <= 2**11
        return head.to(torch.float16 if small else torch.float32)


def _integers(sums: torch.Tensor) -> np.ndarray:
    """The same as int64 on the host."""
    return sums.long().contiguous().cpu().numpy()


@dataclass(frozen=True, eq=False)
class BlockMask:
    """Which (query block, key block) pairs each head computes.

    Attributes:
        bits: bool[H, nq, nk], a tensor on any device or a numpy array; True is a dense block. Rows may be empty.
        grid: How tokens are cut into blocks.

    Raises:
        ValueError: When the bits are not bool, or their shape does not fit the grid.
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

    def subdivided(self, grid: BlockGrid) -> BlockMask:
        """The same mask on a grid whose blocks are parts of this one's. Raises ValueError when they are not."""
        old, new = self.grid, grid
        if old == new:
            return self
        if not new.subdivides(old):
            raise UserError(f"the blocks of {new} are not parts of those of {old}")
        rows = torch.from_numpy(old.q_axis.block_of[new.q_axis.starts]).to(self.bits.device)
        columns = torch.from_numpy(old.k_axis.block_of[new.k_axis.starts]).to(self.bits.device)
        return BlockMask(self.bits[:, rows][:, :, columns], grid)

    @cached_property
    def counts(self) -> MaskCounts:
        """Dense blocks by row, column and slot."""
        return MaskCounts(self.bits)
