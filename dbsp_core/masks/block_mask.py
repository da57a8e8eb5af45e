"""Block masks, and the counts of their dense blocks that planners look at, made on the device where the bits are."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from dbsp_core.masks.grid import BlockGrid
from dbsp_core.utils.errors import UserError

__all__ = ["BlockMask", "MaskCounts", "row_places"]

SUM = torch.float32  # exact: sums stay below 2**24
AT_ONCE = 2**20  # bits to turn into numbers together: as such they take several times their bytes
REMEMBERED = 4  # assignments of slots whose counts are kept: a planner's own, the baseline's, and those before


class MaskCounts:
    """Counts of a mask's bits, a few heads at a time.

    parts: bool[H, nq, nk] each, one for each sequence

    Each is made once, or by each of several threads that ask at the same time; every thread gets its own.
    """

    def __init__(self, *parts: torch.Tensor) -> None:
        self._parts = parts
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
            rows, columns = zip(*map(_sums, self._parts), strict=True)
            self._sums = _integers(torch.cat(rows, dim=1)), _integers(torch.cat(columns, dim=1))
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
        device, width, summed = self._parts[0].device, ring * len(missing), self._sums is not None
        wanted = torch.from_numpy(np.concatenate([s + ring * n for n, s in enumerate(missing)], axis=1)).to(device)
        to_slot = torch.nn.functional.one_hot(wanted, width).unflatten(1, (len(missing), -1)).sum(dim=1)
        cells, columns, first = [], [], 0
        for part in self._parts:
            here, head = to_slot[:, first : first + part.shape[2]], 0
            first += part.shape[2]
            of_heads, sums = [], []
            for wide in _widened(part):
                of_heads.append(wide @ here[head : head + len(wide)].to(wide.dtype))
                head += len(wide)
                if not summed:
                    sums.append(wide.sum(dim=1, dtype=SUM))
            cells.append(torch.cat(of_heads))
            columns.extend([torch.cat(sums)] if sums else [])
        # Slot by slot in memory: what is summed over rows is one slot's counts.
        by_slot = torch.cat(cells, dim=1).permute(2, 0, 1).int().contiguous().cpu().numpy().transpose(1, 2, 0)
        counted = np.split(by_slot, len(missing), axis=2)
        if not summed:
            rows = np.ascontiguousarray(counted[0].sum(axis=2, dtype=np.int64))
            self._sums = rows, _integers(torch.cat(columns, dim=1))
        found = [(ring, slots.copy(), one) for slots, one in zip(missing, counted, strict=True)]
        self._cells = [*found, *self._cells][:REMEMBERED]
        return counted

    def _known(self, slots: np.ndarray, ring: int) -> np.ndarray | None:
        """Cells that were counted before."""
        found = (cells for r, known, cells in self._cells if r == ring and np.array_equal(known, slots))
        return next(found, None)


def _sums(part: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[H, nq], [H, nk]: the sums of a part's rows and columns, where its bits are."""
    if part.is_cuda:  # adds up single bytes as fast as it reads them
        rows, columns = (torch.cat([head.sum(dim=axis, dtype=SUM) for head in part.split(1)]) for axis in (2, 1))
        return rows, columns
    narrow = np.uint16 if max(part.shape[1:]) < 2**16 else np.int64  # the narrower, the faster
    values = part.view(torch.uint8).numpy()
    rows, columns = (
        torch.from_numpy(np.add.reduce(values, axis=axis, dtype=narrow).astype(np.int64)) for axis in (2, 1)
    )
    return rows, columns


def _widened(part: torch.Tensor) -> Iterator[torch.Tensor]:
    """[h, nq, nk] ones and zeros to add up, a few heads h at a time: in 16 bits, products are exact below 2**11."""
    small = part.is_cuda and max(part.shape[1:]) <= 2**11
    for some in part.split(max(1, AT_ONCE // max(1, part[0].numel()))):
        # As bytes a CPU widens them four times as fast.
        yield some.view(torch.uint8).to(torch.float16 if small else torch.float32)


def _integers(sums: torch.Tensor) -> np.ndarray:
    """The same as int64 on the host."""
    return sums.long().contiguous().cpu().numpy()


@dataclass(frozen=True, eq=False)
class BlockMask:
    """Which (query block, key block) pairs each head computes.

    Attributes:
        bits: bool[H, nq, nk], a tensor on any device or a numpy array; True is a dense block. Rows may be empty. Of a
            packed grid bool[H · pairs]: those of its sequences, each [H, nq, nk] of its own, one after another. What
            lies between two sequences is no bit at all.
        grid: How tokens are cut into blocks.

    Raises:
        ValueError: When the bits are not bool, or their shape does not fit the grid.
    """

    bits: torch.Tensor
    grid: BlockGrid

    def __post_init__(self) -> None:
        bits, grid = torch.as_tensor(self.bits), self.grid
        if bits.dtype != torch.bool:
            raise UserError(f"mask bits must be bool, got {bits.dtype}; compare with a threshold first")
        if grid.packed_from:
            if bits.ndim != 1 or len(bits) == 0 or len(bits) % grid.pairs:
                raise UserError(
                    f"mask of shape {tuple(bits.shape)} does not fit a packed grid of {len(grid.packed_from)} "
                    "sequences, which has bits for each of them; give their masks to BlockMask.packed"
                )
        elif bits.ndim != 3 or tuple(bits.shape[1:]) != (grid.nq, grid.nk) or bits.shape[0] < 1:
            raise UserError(
                f"mask of shape {tuple(bits.shape)} does not fit {grid.tokens} tokens in blocks of "
                f"{grid.block_q}×{grid.block_k}: expected [heads, {grid.nq}, {grid.nk}]"
            )
        object.__setattr__(self, "bits", bits)
        if len(grid.orders) not in (1, self.heads):
            raise UserError(f"the grid has token orders for {len(grid.orders)} heads, the mask {self.heads} heads")

    @classmethod
    def dense(cls, heads: int, grid: BlockGrid) -> BlockMask:
        """Every block of every head; of a packed grid, within each sequence."""
        shape = (heads * grid.pairs,) if grid.packed_from else (heads, grid.nq, grid.nk)
        return cls(torch.ones(shape, dtype=torch.bool), grid)

    @classmethod
    def packed(cls, masks: Sequence[BlockMask]) -> BlockMask:
        """Several sequences' masks as one, in which no sequence attends to another.

        Args:
            masks: With equal heads and block sizes. Where some are on a GPU, so is the packed one.

        Raises:
            UserError: For no masks, or heads or block sizes that differ.
        """
        if not masks:
            raise UserError("BlockMask.packed needs at least one sequence's mask, got none")
        heads = sorted({mask.heads for mask in masks})
        if len(heads) > 1:
            raise UserError(
                "sequences that are packed need equal numbers of heads, got masks of "
                f"{' and '.join(map(str, heads))}; give masks of one model"
            )
        grid = BlockGrid.packed([mask.grid for mask in masks])
        if len(grid.sequences) == 1:
            return masks[0]
        device = max((mask.bits.device for mask in masks), key=lambda device: device.type != "cpu")
        return cls(torch.cat([part.bits.to(device).flatten() for mask in masks for part in mask.parts]), grid)

    @cached_property
    def parts(self) -> tuple[BlockMask, ...]:
        """The sequences' masks, whose bits are these; a plain mask is its own."""
        if not self.grid.packed_from:
            return (self,)
        pieces = self.bits.split([self.heads * grid.nq * grid.nk for grid in self.grid.sequences])
        each = zip(pieces, self.grid.sequences, strict=True)
        return tuple(BlockMask(bits.view(self.heads, grid.nq, grid.nk), grid) for bits, grid in each)

    @property
    def heads(self) -> int:
        return len(self.bits) // self.grid.pairs if self.grid.packed_from else len(self.bits)

    @property
    def density(self) -> float:
        """Share of blocks that are dense; of a packed mask, of those within its sequences."""
        return int(self.bits.sum()) / self.bits.numel()

    def square(self, heads: int | slice | np.ndarray = slice(None)) -> torch.Tensor:
        """bool[..., nq, nk] of some heads, False between sequences: for what shows or checks a mask.

        It grows with the square of all sequences' blocks together.
        """
        if not self.grid.packed_from:
            return self.bits[heads]
        chosen = [part.bits[heads] for part in self.parts]
        found = chosen[0].new_zeros(*chosen[0].shape[:-2], self.grid.nq, self.grid.nk)
        for own, q, k in zip(chosen, self.grid.q_axis.bounds, self.grid.k_axis.bounds, strict=False):
            found[..., q : q + own.shape[-2], k : k + own.shape[-1]] = own
        return found

    @property
    def row_bits(self) -> torch.Tensor:
        """bool[H · nq, nk]; of a packed mask bool[H · pairs], whose rows have several lengths. See `row_places`."""
        return self.bits if self.grid.packed_from else self.bits.flatten(0, 1)

    @cached_property
    def fingerprint(self) -> int:
        """63 bits that differ between masks, to compare ranks by."""
        digest = hashlib.blake2b(str(self.grid).encode(), digest_size=8)
        for piece in self.bits.split(AT_ONCE if self.grid.packed_from else 1):
            digest.update(np.packbits(piece.cpu().numpy()).tobytes())
        return int.from_bytes(digest.digest(), "big") >> 1

    def subdivided(self, grid: BlockGrid) -> BlockMask:
        """The same mask on a grid whose blocks are parts of this one's. Raises ValueError when they are not."""
        old, new = self.grid, grid
        if old == new:
            return self
        if not new.subdivides(old):
            raise UserError(f"the blocks of {new} are not parts of those of {old}")
        if old.packed_from:
            both = zip(self.parts, new.sequences, strict=True)
            return BlockMask.packed([part.subdivided(finer) for part, finer in both])
        rows = torch.from_numpy(old.q_axis.block_of[new.q_axis.starts]).to(self.bits.device)
        columns = torch.from_numpy(old.k_axis.block_of[new.k_axis.starts]).to(self.bits.device)
        return BlockMask(self.bits[:, rows][:, :, columns], grid)

    @cached_property
    def counts(self) -> MaskCounts:
        """Dense blocks by row, column and slot."""
        return MaskCounts(*(part.bits for part in self.parts))


def row_places(grid: BlockGrid, heads: int, head: np.ndarray, block: np.ndarray) -> np.ndarray:
    """int64[n]: where rows are in `row_bits` of a mask: which rows, or of a packed mask where they begin.

    head, block: int64[n], of each row;  heads: of the mask
    """
    if not grid.packed_from:
        return head * grid.nq + block
    nq, nk = (np.diff(axis.bounds) for axis in (grid.q_axis, grid.k_axis))
    sequence = grid.q_axis.sequence_of[block]
    first = heads * (np.cumsum(nq * nk) - nq * nk)
    own = head * nq[sequence] + block - grid.q_axis.bounds[sequence]
    return first[sequence] + own * nk[sequence]
