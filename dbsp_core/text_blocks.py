"""Where other projects' blocks lie among text and video, and how they become blocks of our grid."""

from __future__ import annotations

import numpy as np
import torch

from dbsp_core.grid import BlockAxis, BlockGrid

__all__ = ["fit_blocks"]


def fit_blocks(
    bits: torch.Tensor, grid: BlockGrid, *, joined: bool = False, crop: bool = False, tail_dense: bool = False
) -> torch.Tensor:
    """bool[H, nq, nk] on `grid`, from blocks that may leave text out, run on from text into video, or reach too far.

    joined:     blocks are counted from the first token on, whatever is text; a block of the grid is dense when any of
                the blocks that share tokens with it is. Else text has blocks of its own, as in the grid
    crop:       drop rows and columns beyond the last
    tail_dense: make the last row and column dense where the last block is short
    Masks without text get dense rows and columns for it. Raises ValueError, naming an option, for what does not fit.
    """
    q, k = (_Counting(axis, grid, joined) for axis in (grid.q_axis, grid.k_axis))
    rows, columns = q.given(bits.shape[1], crop), k.given(bits.shape[2], crop)
    if rows is None or columns is None:
        raise ValueError(_complaint(bits, grid, q, k, joined))
    bits = _with_text(bits[:, : rows.stop - rows.start, : columns.stop - columns.start], rows.start, columns.start)
    if tail_dense and q.short:
        bits[:, -1] = True
    if tail_dense and k.short:
        bits[:, :, -1] = True
    return _spread(_spread(bits, q.sources, 1), k.sources, 2) if joined else bits


class _Counting:
    """How one axis is counted: `total` blocks, the first `text` of which are of text.

    sources: int64[n, 2], for each block of the grid the first and last block that share tokens with it
    """

    def __init__(self, axis: BlockAxis, grid: BlockGrid, joined: bool) -> None:
        self.total = -(-grid.tokens // axis.block) if joined else len(axis)
        self.text = -(-grid.text_tokens // axis.block)
        self.short = (grid.tokens if joined else grid.tokens - grid.text_tokens) % axis.block != 0
        self.sources = np.stack([axis.starts, axis.starts + axis.lengths - 1], axis=1) // axis.block

    def given(self, count: int, crop: bool) -> range | None:
        """Which blocks so many stand for: all of them, or all but text's."""
        for first in dict.fromkeys((0, self.text)):
            wanted = self.total - first
            if count == wanted or (crop and count > wanted and (first or count > self.total)):
                return range(first, self.total)
        return None


def _with_text(bits: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """So many dense rows above and columns to the left. A copy."""
    heads, nq, nk = bits.shape
    whole = torch.ones(heads, nq + rows, nk + columns, dtype=torch.bool)
    whole[:, rows:, columns:] = bits
    return whole


def _spread(bits: torch.Tensor, sources: np.ndarray, dim: int) -> torch.Tensor:
    """Each block of the grid from the one or more that share tokens with it."""
    result = bits.index_select(dim, torch.from_numpy(sources[:, 0]))
    for step in range(1, int((sources[:, 1] - sources[:, 0]).max(initial=0)) + 1):
        result = result | bits.index_select(dim, torch.from_numpy(np.minimum(sources[:, 0] + step, sources[:, 1])))
    return result


def _complaint(bits: torch.Tensor, grid: BlockGrid, q: _Counting, k: _Counting, joined: bool) -> str:
    rows, columns = bits.shape[1:]
    other = [_Counting(axis, grid, not joined) for axis in (grid.q_axis, grid.k_axis)]
    text = (
        f"masks have {rows}×{columns} blocks; {grid.tokens} tokens ({grid.text_tokens} of text) in blocks of "
        f"{grid.block_q}×{grid.block_k} make {q.total}×{k.total}"
    )
    if other[0].given(rows, False) is not None and other[1].given(columns, False) is not None:
        flag = "leave out --joined-text" if joined else "--joined-text if blocks run on from text into video"
        return f"{text}; {flag}"
    if rows >= q.total and columns >= k.total:
        return f"{text}; correct --thw, --text-tokens or the block sizes, or drop what is beyond them with --crop"
    return f"{text}; correct --thw (or --tokens), --text-tokens, --block-q or --block-k"
