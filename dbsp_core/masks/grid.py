"""Block grids: text and video tokens in token order, cut into query blocks and key blocks."""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from dbsp_core.utils.errors import UserError, require_value

if TYPE_CHECKING:
    import torch


CANONICAL = "thw"
AXIS_ORDERS = tuple("".join(axes) for axes in itertools.permutations(CANONICAL))
"""The six orders of frames, rows and columns, slowest first (PAROAttention, §3.2): "hwt" has time innermost."""

_TILES = re.compile(r"tile:([1-9]\d{0,8})x([1-9]\d{0,8})x([1-9]\d{0,8})")


def require_order(order: str) -> None:
    """Raises UserError unless `order` is in AXIS_ORDERS or "tile:TxHxW"."""
    if order not in AXIS_ORDERS and not _TILES.fullmatch(order):
        raise UserError(
            f"unknown token order {order!r}; use one of {', '.join(AXIS_ORDERS)}, or tiles such as 'tile:4x4x4' "
            "(frames × rows × columns)"
        )


@functools.lru_cache(maxsize=16)
def video_order(order: str, thw: tuple[int, int, int]) -> np.ndarray:
    """Returns read-only int64[t·h·w]: the (t, h, w) position of each video token in `order`.

    Order "tile:TxHxW" (Sliding Tile Attention) sorts tiles by (t, h, w), and tokens within a tile likewise; border
    tiles may be smaller. Raises UserError for an unknown order.
    """
    require_order(order)
    tiles = _TILES.fullmatch(order)
    if tiles is None:
        positions = np.arange(np.prod(thw)).reshape(thw)
        token_permutation = positions.transpose([CANONICAL.index(axis) for axis in order]).reshape(-1)
    else:
        position = np.indices(thw).reshape(3, -1)
        tile, within = np.divmod(position, np.array([int(size) for size in tiles.groups()])[:, None])
        token_permutation = np.lexsort((*within[::-1], *tile[::-1]))
    token_permutation.flags.writeable = False
    return token_permutation


def tile_lengths(order: str, thw: tuple[int, int, int]) -> np.ndarray:
    """Returns the tokens of each tile, int64[tiles], for order "tile:TxHxW". Raises UserError for other orders."""
    tiles = _TILES.fullmatch(order)
    if tiles is None:
        raise UserError(f"blocks of whole tiles need an order such as 'tile:4x4x4', got {order!r}")
    sides = [np.diff(np.append(np.arange(0, n, int(size)), n)) for n, size in zip(thw, tiles.groups(), strict=True)]
    lengths: np.ndarray = (sides[0][:, None, None] * sides[1][:, None] * sides[2]).ravel()
    return lengths


class Video(NamedTuple):
    """Token grid of a video or image, with the text of its sequence."""

    thw: tuple[int, int, int]  # frames (1 for an image), rows and columns of tokens
    text: int = 0  # text tokens in the same sequence
    text_runs: tuple[int, ...] = ()  # tokens of each run of one kind (text, audio, reference images)

    @property
    def grid_tokens(self) -> int:
        """Tokens of the video."""
        frames, height, width = self.thw
        return frames * height * width

    @property
    def tokens(self) -> int:
        """Tokens of video and text."""
        return self.text + self.grid_tokens


Order = str | tuple[str, ...]
"""A token order: one of `AXIS_ORDERS` or "tile:TxHxW"; for a packed grid, one per sequence."""


@dataclass(frozen=True, eq=False, repr=False)
class BlockAxis:
    """The blocks of queries or of keys."""

    starts: np.ndarray  # int64[n], token-order position of each block's first token
    lengths: np.ndarray  # int64[n], tokens in each block
    block: int  # block size; the last block of text or video may be shorter
    bounds: np.ndarray  # int64[S + 1], first block of each sequence, then the number of blocks

    def __len__(self) -> int:
        return len(self.starts)

    @cached_property
    def block_of(self) -> np.ndarray:
        """int64[tokens]: the block that holds each token."""
        return np.repeat(np.arange(len(self)), self.lengths)

    @cached_property
    def sequence_of(self) -> np.ndarray:
        """int64[n]: the sequence of each block."""
        return np.repeat(np.arange(len(self.bounds) - 1), np.diff(self.bounds))


@dataclass(frozen=True)
class BlockGrid:
    """Tokens in token order (text first, then video) cut into blocks of at most `block_q` queries or `block_k` keys.

    Blocks do not mix text and video; the last block of either may be short. A packed grid concatenates sequences, each
    with its text first; blocks do not mix sequences.

    Attributes:
        tokens: Text and video together.
        text_tokens: Text of all sequences.
        block_q: Tokens per query block.
        block_k: Tokens per key block.
        thw: Frames, rows and columns of the video's token grid, required for orders other than "thw". None in a packed
            grid.
        orders: Order of video tokens (`Order`), one for all heads or one per head.
        packed_from: The sequences of a packed grid, made by `packed`; see `sequences`.
        whole_tiles: True if blocks do not mix tiles, so that blocks of border tiles are short; requires one tile order
            for all heads.
        text_runs: Tokens of each run of text; blocks do not mix runs. Empty: one run.

    Raises:
        UserError: The sizes are invalid, or the orders do not fit.
    """

    tokens: int
    text_tokens: int
    block_q: int
    block_k: int
    thw: tuple[int, int, int] | None = None
    orders: tuple[Order, ...] = (CANONICAL,)
    packed_from: tuple[BlockGrid, ...] = ()
    whole_tiles: bool = False
    text_runs: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.packed_from:
            sizes = self.tokens, self.text_tokens, self.block_q, self.block_k, self.thw, self.orders
            if sizes != _packed_sizes(self.packed_from):
                raise UserError(
                    "a packed grid takes sizes, thw and orders from its sequences; change the sequences and pack them "
                    "again with BlockGrid.packed"
                )
            return
        if self.tokens < 1:
            raise UserError(f"a block grid needs at least one token, got tokens={self.tokens}")
        if not 0 <= self.text_tokens <= self.tokens:
            raise UserError(f"text_tokens={self.text_tokens} must lie between 0 and tokens={self.tokens}")
        if self.text_runs and sum(self.text_runs) != self.text_tokens:
            raise UserError(f"text_runs {self.text_runs} must add up to text_tokens={self.text_tokens}")
        for name in ("block_q", "block_k"):
            require_value(self, name, getattr(self, name) >= 1, "must be at least 1; 64 and 128 are usual")
        if not self.orders:
            raise UserError(f"orders must not be empty; omit it for {CANONICAL!r}")
        for order in set(self.orders):
            if not isinstance(order, str):
                raise UserError(f"orders must be names, got {order}; pack sequences with BlockGrid.packed")
            require_order(order)
        if self.whole_tiles and (self.thw is None or len(set(self.orders)) > 1):
            raise UserError("blocks of whole tiles need thw, and one order of tiles for all heads")
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
    def uniform(cls, tokens: int, block: int = 64, text_tokens: int = 0) -> BlockGrid:
        """Returns a grid with equal block_q and block_k; `tokens` counts text and video."""
        return cls(tokens, text_tokens, block, block)

    @classmethod
    def packed(cls, grids: Sequence[BlockGrid]) -> BlockGrid:
        """Concatenates the grids of sequences, without mixing blocks; packed grids are flattened.

        Raises:
            UserError: No sequences, different block sizes, or token orders for different numbers of heads.
        """
        sequences = tuple(sequence for grid in grids for sequence in grid.sequences)
        if not sequences:
            raise UserError("BlockGrid.packed needs at least one sequence's grid, got none")
        sizes = sorted({(grid.block_q, grid.block_k) for grid in sequences})
        if len(sizes) > 1:
            raise UserError(
                "packed sequences need equal block sizes, got "
                f"{' and '.join(f'{q}×{k}' for q, k in sizes)}; set one block_q and block_k for all their mask sources"
            )
        return sequences[0] if len(sequences) == 1 else cls(*_packed_sizes(sequences), sequences)

    @property
    def sequences(self) -> tuple[BlockGrid, ...]:
        """The grids of the packed sequences, or this grid if not packed."""
        return self.packed_from or (self,)

    @cached_property
    def token_bounds(self) -> np.ndarray:
        """int64[S + 1]: first token of each sequence, then the number of tokens."""
        return np.cumsum([0, *(grid.tokens for grid in self.sequences)])

    @cached_property
    def text_positions(self) -> np.ndarray:
        """int64[text_tokens]: canonical positions of text."""
        starts = zip(self.token_bounds, self.sequences, strict=False)
        return np.concatenate([first + np.arange(grid.text_tokens) for first, grid in starts])

    @cached_property
    def q_axis(self) -> BlockAxis:
        return self._axis(self.block_q)

    @cached_property
    def k_axis(self) -> BlockAxis:
        return self._axis(self.block_k)

    @cached_property
    def nq(self) -> int:
        """Number of query blocks."""
        return len(self.q_axis)

    @cached_property
    def nk(self) -> int:
        """Number of key blocks."""
        return len(self.k_axis)

    @cached_property
    def pairs(self) -> int:
        """Number of (query block, key block) pairs per head: Σ nq · nk over sequences."""
        return sum(grid.nq * grid.nk for grid in self.sequences)

    @cached_property
    def only_last_is_short(self) -> bool:
        """True if all query and key blocks but the last are full."""
        return all(bool((axis.lengths[:-1] == axis.block).all()) for axis in (self.q_axis, self.k_axis))

    def with_orders(self, orders: Sequence[Order]) -> BlockGrid:
        """Returns the grid with other token orders, one for all heads or one per head."""
        if not self.packed_from:
            return replace(self, orders=tuple(orders))
        sequences = []
        for position, grid in enumerate(self.packed_from):
            sequence_orders = [order if isinstance(order, str) else order[position] for order in orders]
            sequences.append(
                grid.with_orders(sequence_orders[:1] if len(set(sequence_orders)) == 1 else sequence_orders)
            )
        return BlockGrid.packed(sequences)

    @property
    def common_order(self) -> Order | None:
        """The token order of all heads, or None if heads differ."""
        return self.orders[0] if len(set(self.orders)) == 1 else None

    def order_of(self, head: int) -> Order:
        """Returns the token order of a head."""
        return self.orders[head if len(self.orders) > 1 else 0]

    def order_groups(self, heads: int) -> list[tuple[Order, np.ndarray]]:
        """Returns (order, int64 heads with this order) for every order, sorted by first head."""
        if self.common_order is not None:
            return [(self.common_order, np.arange(heads))]
        having: dict[Order, list[int]] = {}
        for head, order in enumerate(self.orders):
            having.setdefault(order, []).append(head)
        return [(order, np.array(numbers)) for order, numbers in having.items()]

    def token_permutation(self, order: Order) -> np.ndarray:
        """Returns the canonical position (text, then video in (t, h, w)) of each token in `order`, int64[tokens]."""
        if isinstance(order, str):
            if order == CANONICAL or self.thw is None:
                return np.arange(self.tokens)
            return np.concatenate([np.arange(self.text_tokens), self.text_tokens + video_order(order, self.thw)])
        each = zip(self.token_bounds, self.sequences, order, strict=False)
        return np.concatenate([first + grid.token_permutation(sequence_order) for first, grid, sequence_order in each])

    def make_text_dense(self, bits: np.ndarray | torch.Tensor) -> None:
        """Sets all rows and columns of text in bool[..., nq, nk] within each sequence, in place."""
        q_bounds, k_bounds = self.q_axis.bounds, self.k_axis.bounds
        for position, grid in enumerate(self.sequences):
            (q, k), ends = (q_bounds[position], k_bounds[position]), (q_bounds[position + 1], k_bounds[position + 1])
            within = bits[..., q : ends[0], k : ends[1]]
            text_q, text_k = (sum(-(-run // size) for run in grid._runs) for size in (grid.block_q, grid.block_k))
            within[..., :text_q, :], within[..., :text_k] = True, True

    def _segments(self) -> list[int]:
        """Returns the tokens of each run that is cut into blocks: text, then the video or its tiles."""
        if not self.whole_tiles or self.thw is None:
            return [*self._runs, self.tokens - self.text_tokens]
        return [*self._runs, *tile_lengths(str(self.orders[0]), self.thw).tolist()]

    @property
    def _runs(self) -> tuple[int, ...]:
        return self.text_runs or (self.text_tokens,)

    def _axis(self, block: int) -> BlockAxis:
        starts, bounds, first = [], [0], 0
        for grid in self.sequences:
            for segment in grid._segments():
                starts.append(first + np.arange(0, segment, block))
                first += segment
            bounds.append(sum(map(len, starts)))
        all_starts = np.concatenate(starts)
        return BlockAxis(all_starts, np.diff(all_starts, append=self.tokens), block, np.array(bounds))


def _packed_sizes(sequences: tuple[BlockGrid, ...]) -> tuple[int, int, int, int, None, tuple[Order, ...]]:
    """Returns the fields of a grid packed from sequences of one block size. Raises UserError if heads differ."""
    heads = sorted({len(grid.orders) for grid in sequences} - {1})
    if len(heads) > 1:
        raise UserError(
            "packed sequences need equal numbers of heads, got token orders for "
            f"{' and '.join(map(str, heads))}; pass masks of one model"
        )
    orders: tuple[Order, ...] = (CANONICAL,)
    if any(set(grid.orders) != {CANONICAL} for grid in sequences):
        orders = tuple(tuple(grid.order_of(head) for grid in sequences) for head in range(max(heads, default=1)))  # type: ignore[misc]
    tokens, text_tokens = (sum(getattr(grid, name) for grid in sequences) for name in ("tokens", "text_tokens"))
    return tokens, text_tokens, sequences[0].block_q, sequences[0].block_k, None, orders
