"""Block masks."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar, cast

import numpy as np
import torch

from dbsp_core.masks.grid import BlockGrid
from dbsp_core.masks.mask_counts import MaskCounts
from dbsp_core.utils.errors import UserError

__all__ = ["BlockMask", "require_mask", "row_places"]

Value = TypeVar("Value")

AT_ONCE = 2**20  # bits to fingerprint together


@dataclass(frozen=True, eq=False, repr=False)
class BlockMask:
    """Which (query block, key block) pairs each head computes.

    Attributes:
        bits: bool[H, nq, nk], a tensor on any device or a numpy array; True is a dense block. Rows may be empty. Of a
            packed grid bool[H · pairs]: those of its sequences, each [H, nq, nk] of its own, one after another. What
            lies between two sequences is no bit at all. An array is copied. What was counted of a tensor is
            counted anew once it has been set in place; plans and executors stay as they were made.
        grid: How tokens are cut into blocks.

    Raises:
        ValueError: When the bits are not bool, or their shape does not fit the grid.
    """

    bits: torch.Tensor
    grid: BlockGrid
    _derived: dict[str, tuple[int, Any]] = field(default_factory=dict, init=False)
    """By name what was made of the bits, after the version of them that it was made of."""

    def __post_init__(self) -> None:
        bits, grid = _with_version(self.bits), self.grid
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

    def __repr__(self) -> str:
        grid, device = self.grid, self.bits.device
        dense = f"density {self.density:.3f}" if device.type == "cpu" else f"on {device}"  # to read bits is to wait
        packed = f", {len(grid.packed_from)} sequences packed" if grid.packed_from else ""
        size = f"{self.heads} heads of {grid.nq} × {grid.nk} blocks"
        return f"<{type(self).__name__} of {size}{packed}, {grid.tokens} tokens, {dense}>"

    @classmethod
    def dense(cls, heads: int, grid: BlockGrid) -> BlockMask:
        """Every block of every head; of a packed grid, within each sequence."""
        shape = (heads * grid.pairs,) if grid.packed_from else (heads, grid.nq, grid.nk)
        return cls(torch.ones(shape, dtype=torch.bool, device="cpu"), grid)

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

    @property
    def fingerprint(self) -> int:
        """63 bits that differ between masks, to compare ranks by."""
        return self._of_bits("fingerprint", self._fingerprint)

    def _fingerprint(self) -> int:
        digest = hashlib.blake2b(str(self.grid).encode(), digest_size=8)
        for piece in self.bits.split(AT_ONCE if self.grid.packed_from else 1):
            digest.update(np.packbits(piece.cpu().numpy()).tobytes())
        return int.from_bytes(digest.digest(), "big") >> 1

    @property
    def counts(self) -> MaskCounts:
        """Dense blocks by row, column and slot."""
        return self._of_bits("counts", lambda: MaskCounts(*(part.bits for part in self.parts)))

    def _of_bits(self, name: str, make: Callable[[], Value]) -> Value:
        """What was made of the bits before, unless they have been set in place since; else it is made now."""
        version, known = self.bits._version, self._derived.get(name)
        if known is None or known[0] != version:
            known = self._derived[name] = version, make()
        return cast(Value, known[1])


def require_mask(mask: object) -> None:
    """Raises UserError for what is no BlockMask."""
    if isinstance(mask, BlockMask):
        return
    if isinstance(mask, (torch.Tensor, np.ndarray)):
        fix = "make one of these bits: BlockMask(bits, BlockGrid.uniform(tokens, block=64))"
    else:
        fix = "the mask comes first, then the strategy"
    raise UserError(f"mask must be a BlockMask, got a {type(mask).__name__}; {fix}")


def _with_version(bits: torch.Tensor | np.ndarray) -> torch.Tensor:
    """The same tensor, or a copy of what could be set in place without its version telling of it."""
    if isinstance(bits, np.ndarray):
        return torch.from_numpy(bits.copy())
    if not isinstance(bits, torch.Tensor):
        bits = torch.as_tensor(bits, device="cpu")
    if not bits.is_inference():
        return bits
    with torch.inference_mode(False):
        return bits.clone()


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
