"""`BlockMask`: bits on a block grid, with optional absent keys and a branch that the model adds."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar, cast

import numpy as np
import torch

from dbsp_core.masks.branches import Branch
from dbsp_core.masks.grid import BlockGrid
from dbsp_core.masks.mask_counts import MaskCounts
from dbsp_core.utils.errors import UserError

Value = TypeVar("Value")

AT_ONCE = 2**20  # bits fingerprinted at a time


@dataclass(frozen=True, eq=False, repr=False)
class BlockMask:
    """The (query block, key block) pairs that each head computes.

    Attributes:
        bits: bool[H, nq, nk], a tensor on any device or a numpy array (copied); True is an active block. Rows may be
            empty. On a packed grid bool[H · pairs], the [H, nq, nk] of each sequence concatenated. Counts follow
            in-place changes of a tensor; plans do not.
        grid: The blocks.
        branch: Branch that the model adds to the output, or None.
        absent: float32[H, nq] or None: log-sum-exp (natural log) of the scores of keys with zero value that each row
            attends to besides its blocks; −inf for none. Such keys are a checkpoint's zero padding, or a sink (a
            learned score per head).
        heads: H.

    Raises:
        UserError: The bits are not bool, or their shape does not fit the grid.
    """

    bits: torch.Tensor
    grid: BlockGrid
    branch: Branch | None = None
    absent: torch.Tensor | None = None
    heads: int = field(init=False)
    _derived: dict[str, tuple[int, Any]] = field(default_factory=dict, init=False)
    """Cached results by name, with the version of the bits."""

    def __post_init__(self) -> None:
        bits, grid = self.bits, self.grid
        if isinstance(bits, np.ndarray):
            bits = torch.from_numpy(bits.copy())
        elif not isinstance(bits, torch.Tensor):
            bits = torch.as_tensor(bits, device="cpu")
        if bits.is_inference():  # inference tensors do not update `_version`
            with torch.inference_mode(False):
                bits = bits.clone()
        if bits.dtype != torch.bool:
            raise UserError(f"mask bits must be bool, got {bits.dtype}; compare with a threshold first")
        object.__setattr__(self, "bits", bits)
        object.__setattr__(self, "heads", bits.numel() // grid.pairs)
        if self.heads < 1 or tuple(bits.shape) != _shape(grid, self.heads):
            wanted = (
                f"a packed grid of {len(grid.packed_from)} sequences, which has bits for each of them; give their "
                "masks to BlockMask.packed"
                if grid.packed_from
                else f"{grid.tokens} tokens in blocks of {grid.block_q}×{grid.block_k}: expected "
                f"[heads, {grid.nq}, {grid.nk}]"
            )
            raise UserError(f"mask of shape {tuple(bits.shape)} does not fit {wanted}")
        if self.absent is not None:
            shape, dtype = tuple(self.absent.shape), self.absent.dtype
            if (shape, dtype) != ((self.heads, grid.nq), torch.float32):
                wanted = f"expected torch.float32 of shape {(self.heads, grid.nq)}, one number for each row"
                raise UserError(f"absent keys are {dtype} of shape {shape}; {wanted}")
        if len(grid.orders) not in (1, self.heads):
            raise UserError(f"the grid has token orders for {len(grid.orders)} heads, the mask {self.heads} heads")

    def __repr__(self) -> str:
        grid, device = self.grid, self.bits.device
        dense = f"density {self.density:.3f}" if device.type == "cpu" else f"on {device}"  # avoid synchronizing
        packed = f", {len(grid.packed_from)} sequences packed" if grid.packed_from else ""
        size = f"{self.heads} heads of {grid.nq} × {grid.nk} blocks"
        return f"<{type(self).__name__} of {size}{packed}, {grid.tokens} tokens, {dense}>"

    @classmethod
    def dense(cls, heads: int, grid: BlockGrid) -> BlockMask:
        """Returns a mask with all blocks active, within each sequence of a packed grid."""
        return cls(torch.ones(_shape(grid, heads), dtype=torch.bool, device="cpu"), grid)

    @classmethod
    def packed(cls, masks: Sequence[BlockMask]) -> BlockMask:
        """Packs the masks of several sequences into one (on a GPU if any mask is), without attention between them.

        Raises:
            UserError: No masks, different numbers of heads or block sizes, or a branch.
        """
        if not masks:
            raise UserError("BlockMask.packed needs at least one sequence's mask, got none")
        heads = sorted({mask.heads for mask in masks})
        if len(heads) > 1:
            raise UserError(
                "packed sequences need equal numbers of heads, got masks of "
                f"{' and '.join(map(str, heads))}; pass masks of one model"
            )
        branch = next((mask.branch for mask in masks if mask.branch is not None), None)
        if branch is not None:
            raise UserError(
                f"a {branch.name} is not supported in packed sequences; set {branch.without} in the mask source"
            )
        grid = BlockGrid.packed([mask.grid for mask in masks])
        if len(grid.sequences) == 1:
            return masks[0]
        device = max((mask.bits.device for mask in masks), key=lambda device: device.type != "cpu")
        bits = torch.cat([part.bits.to(device).flatten() for mask in masks for part in mask.parts])
        if all(mask.absent is None for mask in masks):
            return cls(bits, grid)
        none = (torch.full((mask.heads, mask.grid.nq), -torch.inf, device=device) for mask in masks)
        each = (other if mask.absent is None else mask.absent for mask, other in zip(masks, none, strict=True))
        return cls(bits, grid, absent=torch.cat([scores.to(device) for scores in each], dim=1))

    @cached_property
    def parts(self) -> tuple[BlockMask, ...]:
        """The masks of the sequences as views of these bits, or this mask if not packed."""
        if not self.grid.packed_from:
            return (self,)
        grids = self.grid.sequences
        pieces = self.bits.split([self.heads * grid.nq * grid.nk for grid in grids])
        absent = [None] * len(grids) if self.absent is None else self.absent.split([grid.nq for grid in grids], dim=1)
        each = zip(pieces, grids, absent, strict=True)
        return tuple(BlockMask(b.view(self.heads, grid.nq, grid.nk), grid, absent=a) for b, grid, a in each)

    @property
    def density(self) -> float:
        """Fraction of active blocks, within sequences."""
        return int(self.bits.sum()) / self.bits.numel()

    def square(self, heads: int | slice | np.ndarray = slice(None)) -> torch.Tensor:
        """Returns bool[..., nq, nk] of some heads, False between sequences, for display and tests."""
        if not self.grid.packed_from:
            return self.bits[heads]
        chosen = [part.bits[heads] for part in self.parts]
        square = chosen[0].new_zeros(*chosen[0].shape[:-2], self.grid.nq, self.grid.nk)
        for bits, q, k in zip(chosen, self.grid.q_axis.bounds, self.grid.k_axis.bounds, strict=False):
            square[..., q : q + bits.shape[-2], k : k + bits.shape[-1]] = bits
        return square

    @property
    def row_bits(self) -> torch.Tensor:
        """bool[H · nq, nk]; for a packed mask bool[H · pairs], as rows differ in length; see `row_positions`."""
        return self.bits if self.grid.packed_from else self.bits.flatten(0, 1)

    @property
    def fingerprint(self) -> int:
        """Hash below 2^63, for comparing masks across ranks."""

        def compute() -> int:
            branch = "" if self.branch is None else self.branch.name
            digest = hashlib.blake2b((str(self.grid) + branch).encode(), digest_size=8)
            for piece in self.bits.flatten().split(AT_ONCE):
                digest.update(np.packbits(piece.cpu().numpy()).tobytes())
            if self.absent is not None:
                digest.update(self.absent.cpu().numpy().tobytes())
            return int.from_bytes(digest.digest(), "big") >> 1

        return self._of_bits("fingerprint", compute)

    @property
    def counts(self) -> MaskCounts:
        """Active blocks by row, by column, and by column and rank."""
        return self._of_bits("counts", lambda: MaskCounts(*(part.bits for part in self.parts)))

    def _of_bits(self, name: str, make: Callable[[], Value]) -> Value:
        """Returns a cached result, recomputed if the bits have changed in place."""
        version, known = self.bits._version, self._derived.get(name)
        if known is None or known[0] != version:
            known = self._derived[name] = version, make()
        return cast(Value, known[1])


def require_mask(mask: object) -> None:
    """Raises UserError unless the argument is a BlockMask."""
    if not isinstance(mask, BlockMask):
        fix = "pass the mask first, then the strategy"
        if isinstance(mask, (torch.Tensor, np.ndarray)):
            fix = "make one of these bits: BlockMask(bits, BlockGrid.uniform(tokens, block=64))"
        raise UserError(f"mask must be a BlockMask, got a {type(mask).__name__}; {fix}")


def _shape(grid: BlockGrid, heads: int) -> tuple[int, ...]:
    return (heads * grid.pairs,) if grid.packed_from else (heads, grid.nq, grid.nk)


def row_positions(grid: BlockGrid, heads: int, head: np.ndarray, block: np.ndarray) -> np.ndarray:
    """Returns the positions of rows (head, query block) in a mask's `row_bits`; all int64[n].

    A position is the row's index, or the index of its first bit in a packed mask.
    """
    if not grid.packed_from:
        return head * grid.nq + block
    nq, nk = (np.diff(axis.bounds) for axis in (grid.q_axis, grid.k_axis))
    sequence = grid.q_axis.sequence_of[block]
    first = heads * (np.cumsum(nq * nk) - nq * nk)
    within = head * nq[sequence] + block - grid.q_axis.bounds[sequence]
    return first[sequence] + within * nk[sequence]
