"""The block grid: tokens in token order, cut into blocks."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from dbsp_core.masks.token_order import CANONICAL, require_order, video_order
from dbsp_core.utils.errors import UserError, require_value

if TYPE_CHECKING:
    import torch

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

    No block holds both text and video. The last block of either may be short.

    Attributes:
        tokens: Text and video together.
        text_tokens: Of them, text.
        block_q: Tokens per query block.
        block_k: Tokens per key block.
        thw: Frames, rows and columns of the video's token grid; needed for orders other than "thw".
        orders: The order of video tokens (see `dbsp_core.masks.token_order`), one for all heads or one per head:
            where they differ, a block holds other tokens in other heads.

    Raises:
        ValueError: For sizes that make no grid, or orders that do not fit.
    """

    tokens: int
    text_tokens: int
    block_q: int
    block_k: int
    thw: tuple[int, int, int] | None = None
    orders: tuple[str, ...] = (CANONICAL,)

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise UserError(f"a block grid needs at least one token, got tokens={self.tokens}")
        if not 0 <= self.text_tokens <= self.tokens:
            raise UserError(f"text_tokens={self.text_tokens} must lie between 0 and tokens={self.tokens}")
        for name in ("block_q", "block_k"):
            require_value(self, name, getattr(self, name) >= 1, "must be at least 1; 64 and 128 are usual")
        self._check_orders()

    def _check_orders(self) -> None:
        if not self.orders:
            raise UserError(f"orders must not be empty; leave it out for {CANONICAL!r}")
        for order in set(self.orders):
            require_order(order)
        if self.thw is None:
            if set(self.orders) != {CANONICAL}:
                raise UserError(f"token orders other than {CANONICAL!r} need thw, the size of the video's token grid")
        elif math.prod(self.thw) != self.tokens - self.text_tokens:
            video = self.tokens - self.text_tokens
            raise UserError(
                f"thw={self.thw} makes {math.prod(self.thw)} tokens, but the grid has {video} video tokens "
                f"(tokens={self.tokens}, text_tokens={self.text_tokens})"
            )

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
        return cls(tokens, text_tokens, block if block_q is None else block_q, block if block_k is None else block_k)

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

    def subdivides(self, other: BlockGrid) -> bool:
        """Whether this grid's blocks are the other's, or parts of them."""
        if self.resized(other.block_q, other.block_k) != other:
            return False
        return other.block_q % self.block_q == 0 and other.block_k % self.block_k == 0

    def resized(self, block_q: int, block_k: int) -> BlockGrid:
        """The same tokens in the same order, in blocks of other sizes."""
        return replace(self, block_q=block_q, block_k=block_k)

    @property
    def common_order(self) -> str | None:
        """The order of all heads, or None where they differ."""
        return self.orders[0] if len(set(self.orders)) == 1 else None

    def order_groups(self, heads: int) -> list[tuple[str, np.ndarray]]:
        """(order, int64 heads that have it) for every order, by the first head that has it."""
        if self.common_order is not None:
            return [(self.common_order, np.arange(heads))]
        return [(order, np.flatnonzero(np.array(self.orders) == order)) for order in dict.fromkeys(self.orders)]

    def token_permutation(self, order: str) -> np.ndarray:
        """int64[tokens]: canonical position (text, then video in (t, h, w)) of each token in `order`."""
        if order == CANONICAL or self.thw is None:
            return np.arange(self.tokens)
        return np.concatenate([np.arange(self.text_tokens), self.text_tokens + video_order(order, self.thw)])

    def make_text_dense(self, bits: np.ndarray | torch.Tensor) -> None:
        """Sets all rows and columns of text, which come first. bits: bool[..., nq, nk]"""
        q, k = (int((axis.starts < self.text_tokens).sum()) for axis in (self.q_axis, self.k_axis))
        bits[..., :q, :], bits[..., :k] = True, True

    def _axis(self, block: int) -> BlockAxis:
        starts, first = [], 0
        for segment in (self.text_tokens, self.tokens - self.text_tokens):
            starts.append(first + np.arange(0, segment, block))
            first += segment
        all_starts = np.concatenate(starts)
        return BlockAxis(all_starts, np.diff(all_starts, append=self.tokens), block)
