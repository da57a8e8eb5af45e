"""Reads other projects' blocks over text and video, and turns them into blocks of db-SP's grid."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from dbsp_core.masks.grid import BlockAxis, BlockGrid
from dbsp_core.masks.mask_values import block_counts
from dbsp_core.utils.errors import UserError

__all__ = ["BlockReading", "fit_blocks"]


@dataclass(frozen=True)
class BlockReading:
    """A way to count blocks.

    Attributes:
        joined: Whether blocks are counted from the first token on, so that one may hold text and video; else text and
            video have blocks of their own.
        text: Whether blocks of text are among them, or only the video's.
    """

    grid: BlockGrid
    joined: bool
    text: bool = True

    @classmethod
    def find(
        cls, rows: int, columns: int | None, grid: BlockGrid, joined: bool | None = None, crop: bool = False
    ) -> BlockReading:
        """Finds the reading of masks with these numbers of rows and columns of blocks.

        Args:
            columns: None where unknown.
            joined: None for whichever fits.
            crop: Whether there may be more rows and columns at the end, which don't count.

        Raises:
            UserError: None fits or two do; the message names an option.
        """
        aligned = grid.text_tokens % grid.block_q == 0 and grid.text_tokens % grid.block_k == 0
        joinings = (False,) if aligned else (False, True) if joined is None else (joined,)
        readings = [
            cls(grid, one, text) for one in joinings for text in ((True, False) if grid.text_tokens else (True,))
        ]
        fitting = [r for r in readings if rows == r.rows and columns in (None, r.columns)]
        if not fitting and crop:
            fitting = [r for r in readings if r.text and r.rows <= rows and r.columns <= (columns or r.columns)]
        if len(fitting) > 1:
            raise UserError(
                f"{rows} rows of blocks could be {' or '.join(map(str, fitting))}; say which: --own-text or "
                "--joined-text"
            )
        if not fitting:
            wanted = ", or ".join(f"{r.rows}×{r.columns} ({r})" for r in readings)
            surplus = all(rows >= r.rows and (columns or r.columns) >= r.columns for r in readings)
            raise UserError(
                f"masks have {rows}×{'?' if columns is None else columns} blocks; {grid.tokens} tokens "
                f"({grid.text_tokens} of text) in blocks of {grid.block_q}×{grid.block_k} make {wanted}; correct "
                "--thw (or --tokens), --text-tokens, --block-q, --block-k"
                + ("; or drop what is beyond the last block with --crop" if surplus else "")
            )
        return fitting[0]

    def __str__(self) -> str:
        blocks = "blocks that run on from text into video" if self.joined else "blocks of text and of video"
        if self.text:
            return blocks if self.grid.text_tokens else "blocks"
        return f"{blocks}, those of text left out"

    @property
    def rows(self) -> int:
        """Rows of masks that are read so."""
        total = -(-self.grid.tokens // self.grid.block_q) if self.joined else block_counts(self.grid)[0]
        return total - self.left_out(self.grid.block_q)

    @property
    def columns(self) -> int:
        """Columns of masks that are read so."""
        total = -(-self.grid.tokens // self.grid.block_k) if self.joined else block_counts(self.grid)[1]
        return total - self.left_out(self.grid.block_k)

    def left_out(self, block: int) -> int:
        """Number of text rows or columns, in blocks of this size, that the masks lack."""
        return 0 if self.text else -(-self.grid.text_tokens // block)

    def short(self, axis: BlockAxis) -> bool:
        """True where the last block is shorter than the others."""
        return (self.grid.tokens - (0 if self.joined else self.grid.text_tokens)) % axis.block != 0


def fit_blocks(bits: torch.Tensor, reading: BlockReading, tail_dense: bool = False) -> torch.Tensor:
    """Fits bool[H, ≥ rows, ≥ columns] to the reading's grid, as bool[H, nq, nk]; drops what is beyond the last block.

    Rows and columns of text that are left out become dense. Where blocks run on from text into video, a block of the
    grid is dense when any of those that share tokens with it is.

    Args:
        tail_dense: Whether to make the last row and column dense where the last block is short.
    """
    q, k = reading.grid.q_axis, reading.grid.k_axis
    given = bits[:, : reading.rows, : reading.columns]
    row, column = reading.left_out(q.block), reading.left_out(k.block)
    whole = torch.ones(given.shape[0], given.shape[1] + row, given.shape[2] + column, dtype=torch.bool, device="cpu")
    whole[:, row:, column:] = given
    if tail_dense and reading.short(q):
        whole[:, -1] = True
    if tail_dense and reading.short(k):
        whole[:, :, -1] = True
    return _spread(_spread(whole, q, 1), k, 2) if reading.joined else whole


def _spread(bits: torch.Tensor, axis: BlockAxis, dim: int) -> torch.Tensor:
    """Makes each block of the axis from those that share tokens with it, counted from the first token on."""
    first, last = axis.starts // axis.block, (axis.starts + axis.lengths - 1) // axis.block
    result = bits.index_select(dim, torch.from_numpy(first))
    for step in range(1, int((last - first).max()) + 1):
        result = result | bits.index_select(dim, torch.from_numpy(np.minimum(first + step, last)))
    return result
