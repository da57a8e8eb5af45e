"""The block grid: tokens in token order, cut into blocks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

__all__ = ["BlockAxis", "BlockGrid"]


@dataclass(frozen=True, eq=False)
class BlockAxis:
    """One axis (queries or keys) of a grid.

    starts:  int64[n], token-order position of each block's first token
    lengths: int64[n], tokens in each block, 1..block
    block:   the block size; a segment's last block may be shorter
    """

    starts: np.ndarray
    lengths: np.ndarray
    block: int

    def __len__(self) -> int:
        return len(self.starts)

    @cached_property
    def block_of(self) -> np.ndarray:
        """int64[tokens]: the block that holds each token."""
        return np.repeat(np.arange(len(self)), self.lengths)


@dataclass(frozen=True)
class BlockGrid:
    """Tokens in token order (text first, then video) cut into blocks of at most `block_q` queries or `block_k` keys.

    A text segment starts its own blocks: no block holds both text and video. The last block of a segment may be
    short. Raises ValueError for sizes that make no grid.
    """

    tokens: int
    text_tokens: int
    block_q: int
    block_k: int

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise ValueError(f"a block grid needs at least one token, got tokens={self.tokens}")
        if not 0 <= self.text_tokens <= self.tokens:
            raise ValueError(f"text_tokens={self.text_tokens} must lie between 0 and tokens={self.tokens}")
        for name, size in (("block_q", self.block_q), ("block_k", self.block_k)):
            if size < 1:
                raise ValueError(f"{name}={size} must be at least 1; 64 and 128 are usual")

    @classmethod
    def uniform(
        cls,
        tokens: int,
        block: int = 64,
        text_tokens: int = 0,
        *,
        block_q: int | None = None,
        block_k: int | None = None,
    ) -> BlockGrid:
        """A grid of equal blocks; `tokens` counts text and video together. `block_q`, `block_k` override `block`."""
        sizes = (block if size is None else size for size in (block_q, block_k))
        return cls(tokens, text_tokens, *sizes)

    @cached_property
    def q_axis(self) -> BlockAxis:
        return self._axis(self.block_q)

    @cached_property
    def k_axis(self) -> BlockAxis:
        return self._axis(self.block_k)

    @property
    def nq(self) -> int:
        """Number of query blocks."""
        return len(self.q_axis)

    @property
    def nk(self) -> int:
        """Number of key blocks."""
        return len(self.k_axis)

    def refines(self, other: BlockGrid) -> bool:
        """Whether this grid's blocks are the other's, or parts of them."""
        same_tokens = (self.tokens, self.text_tokens) == (other.tokens, other.text_tokens)
        return same_tokens and other.block_q % self.block_q == 0 and other.block_k % self.block_k == 0

    def _axis(self, block: int) -> BlockAxis:
        starts, first = [], 0
        for segment in (self.text_tokens, self.tokens - self.text_tokens):
            starts.append(first + np.arange(0, segment, block))
            first += segment
        all_starts = np.concatenate(starts)
        return BlockAxis(all_starts, np.diff(all_starts, append=self.tokens), block)
