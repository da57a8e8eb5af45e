"""Sequence layouts: the rank and slot of every token outside attention."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

import numpy as np

from dbsp_core.layout.strategy import Strategy
from dbsp_core.masks.grid import CANONICAL, BlockAxis, BlockGrid, Order
from dbsp_core.utils.errors import UserError, in_number, in_short

Streams = Literal["first", "last"] | None
"""Whether text is first or last on each rank, before or after video; None: they are sharded as one stream."""
LAYOUTS = ("contiguous", "striped")
"""Names of sequence layouts."""


@dataclass(frozen=True, eq=False, repr=False)
class ShardSegments:
    """Segments: runs of a block's tokens that are contiguous on one rank.

    Sorted by (block, offset); every token is in one segment. All fields are int64[F]; `offset` and `local` are the
    first token's positions within the block and on the rank.
    """

    block: np.ndarray
    offset: np.ndarray
    rank: np.ndarray
    local: np.ndarray
    length: np.ndarray

    def tokens_by_rank(self, blocks: int, world: int) -> np.ndarray:
        """Returns float64[blocks, world]: tokens of each block that each rank holds."""
        return np.bincount(self.block * world + self.rank, self.length, blocks * world).reshape(blocks, world)

    def tokens_by_ring(self, blocks: int, strategy: Strategy) -> np.ndarray:
        """Returns float64[blocks, ring]: tokens of each block that each ring rank holds."""
        return self.tokens_by_rank(blocks, strategy.world).reshape(blocks, strategy.ring, -1).sum(axis=2)


@dataclass(frozen=True, eq=False, repr=False)
class SequenceLayout:
    """The rank and slot of every token outside attention; slots without a token are padding.

    Attributes:
        rank: int64[tokens], rank of each token by canonical position (text, then video in (t, h, w)).
        local: int64[tokens], slot of each token on its rank.
        world: Number of ranks.
        shard: Slots per rank.

    Raises:
        ValueError: Two tokens share a slot, or a slot does not exist.
    """

    rank: np.ndarray
    local: np.ndarray
    world: int
    shard: int
    _segments: dict[tuple[BlockGrid, Order], tuple[ShardSegments, ShardSegments]] = field(
        default_factory=dict, init=False, repr=False
    )

    def __repr__(self) -> str:
        return f"<SequenceLayout of {self.tokens} tokens on {in_number(self.world, 'rank')} of {self.shard} slots>"

    def __post_init__(self) -> None:
        inside = (self.rank >= 0) & (self.rank < self.world) & (self.local >= 0) & (self.local < self.shard)
        if not inside.all() or np.bincount(self.rank * self.shard + self.local).max(initial=0) > 1:
            raise ValueError("a sequence layout must give every token a different slot on one of its ranks")

    @classmethod
    def from_streams(cls, streams: Sequence[np.ndarray], world: int) -> SequenceLayout:
        """Cuts each stream into `world` equal shards, padded at the end; a rank holds its shard of each stream.

        Args:
            streams: int64 canonical positions in sharding order; together they hold every token once.
            world: Number of ranks.
        """
        if world < 1:
            raise UserError(f"a sequence layout needs at least one rank, got {world}")
        tokens = sum(len(stream) for stream in streams)
        if not np.array_equal(np.sort(np.concatenate(streams)), np.arange(tokens)):
            raise ValueError(f"the streams of a sequence layout must hold each of the {tokens} tokens once")
        rank, local = np.full(tokens, -1), np.full(tokens, -1)
        first = 0
        for stream in streams:
            shard = -(-len(stream) // world)
            if shard:
                rank[stream], local[stream] = np.divmod(np.arange(len(stream)), shard)
                local[stream] += first
            first += shard
        return cls(rank, local, world, first)

    @classmethod
    def contiguous(cls, tokens: int, world: int) -> SequenceLayout:
        """Gives rank r the r-th run of ceil(tokens / world) tokens, in token order."""
        return cls.from_streams([np.arange(tokens)], world)

    @classmethod
    def whole_sequences(cls, lengths: Sequence[int], ranks: Sequence[int], world: int) -> SequenceLayout:
        """Puts each sequence of a packed grid whole on one rank, as data loaders do; a rank may have none.

        Sequences keep their order on a rank. All ranks have as many slots as the fullest.

        Args:
            lengths: Tokens of each sequence, text included.
            ranks: Rank of each sequence.
            world: Number of ranks.

        Raises:
            UserError: No sequences, unequal numbers of lengths and ranks, or ranks out of range.
        """
        if not len(lengths) or len(lengths) != len(ranks) or min(lengths) < 1:
            raise UserError(
                f"whole_sequences needs a length of at least 1 and a rank for each sequence, got lengths "
                f"{list(lengths)} and ranks {list(ranks)}"
            )
        if not 0 <= min(ranks) <= max(ranks) < world:
            raise UserError(f"ranks of sequences must be 0 to {world - 1}, got {sorted(set(ranks))}")
        held = np.zeros(world, dtype=np.int64)
        local = []
        for length, rank in zip(lengths, ranks, strict=True):
            local.append(held[rank] + np.arange(length))
            held[rank] += length
        return cls(np.repeat(ranks, lengths), np.concatenate(local), world, int(held.max()))

    @classmethod
    def striped(cls, grid: BlockGrid, strategy: Strategy) -> SequenceLayout:
        """Puts block b on ring rank b mod y (up to equal shards), which averages work over the ring."""
        return cls.named("striped", grid, strategy)

    @classmethod
    def named(cls, name: str, grid: BlockGrid, strategy: Strategy, *, streams: Streams = None) -> SequenceLayout:
        """Returns a layout by its name.

        Args:
            name: "contiguous" or "striped".
            grid: The blocks to distribute.
            strategy: The ranks; only the ring affects the order.
            streams: Whether text is first or last if text and video are sharded separately, as in two-stream
                frameworks; a packed grid's texts then form one stream and its videos another. None: one stream.

        Raises:
            UserError: The name is unknown.
        """
        if name not in LAYOUTS:
            raise UserError(f"unknown sequence layout {in_short(name)}; use one of {', '.join(LAYOUTS)}")
        video = np.delete(np.arange(grid.tokens), [] if streams is None else grid.text_positions)
        if name == "striped" and strategy.ring > 1:  # without a ring, order does not matter
            # Sort by stripe, block index modulo ring, keeping the order of blocks within a stripe
            axis = grid.q_axis if grid.block_q >= grid.block_k else grid.k_axis
            in_order = grid.token_permutation(grid.common_order or CANONICAL)
            kept = np.isin(in_order, video)
            video = in_order[kept][np.argsort((axis.block_of % strategy.ring)[kept], kind="stable")]
        parts = {None: [video], "first": [grid.text_positions, video], "last": [video, grid.text_positions]}
        return cls.from_streams(parts[streams], strategy.world)

    def with_streams(self, text: np.ndarray, streams: Streams) -> SequenceLayout:
        """Returns the layout with text moved to each rank's first or last slots.

        Args:
            text: bool[tokens], True for text.
            streams: Whether text is first or last. None: returns the layout unchanged.
        """
        if streams is None:
            return self
        order = np.lexsort((self.local, text if streams == "last" else ~text, self.rank))
        local = np.empty_like(self.local)
        local[order] = np.arange(self.tokens) - np.searchsorted(self.rank[order], self.rank[order])
        return replace(self, local=local)

    @property
    def tokens(self) -> int:
        return len(self.rank)

    @cached_property
    def fingerprint(self) -> int:
        """Hash below 2^63, for comparing layouts across ranks."""
        digest = hashlib.blake2b(f"{self.world} {self.shard}".encode(), digest_size=8)
        for part in (self.rank, self.local):
            digest.update(part.astype(np.int64).tobytes())
        return int.from_bytes(digest.digest(), "big") >> 1

    def tokens_at(self, rank: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns canonical positions and slots of the tokens on `rank`, int64[n] each, ordered by slot."""
        here = np.flatnonzero(self.rank == rank)
        here = here[np.argsort(self.local[here])]
        return here, self.local[here]

    def slots_of(self, rank: int, slots: int | None = None) -> int:
        """Returns a rank's number of slots, `shard` if None. Raises UserError if they cannot hold its tokens."""
        slots = self.shard if slots is None else slots
        least = int(self.local[self.rank == rank].max(initial=-1)) + 1
        if not least <= slots <= self.shard:
            raise UserError(
                f"rank {rank} has {slots} slots, expected {least} to {self.shard}: {self.tokens} tokens are shared by "
                f"{self.world} ranks; pass this layout's tokens in the right dimension (q, k, v: [B, H, tokens, D])"
            )
        return slots

    def segments(self, axis: BlockAxis, token_permutation: np.ndarray | None = None) -> ShardSegments:
        """Returns the segments of an axis's blocks of tokens in order `token_permutation` int64[tokens]."""
        rank, local, block = self.rank, self.local, axis.block_of
        if token_permutation is not None:
            rank, local = rank[token_permutation], local[token_permutation]
        breaks = (np.diff(block) != 0) | (np.diff(rank) != 0) | (np.diff(local) != 1)
        first = np.concatenate([[0], np.flatnonzero(breaks) + 1])
        length = np.diff(first, append=self.tokens)
        return ShardSegments(block[first], first - axis.starts[block[first]], rank[first], local[first], length)

    def block_segments(self, grid: BlockGrid, order: Order) -> tuple[ShardSegments, ShardSegments]:
        """Returns the segments of a grid's query blocks and KV blocks in a token order; cached."""
        key = grid, order
        if key not in self._segments:
            permutation = grid.token_permutation(order)
            self._segments[key] = self.segments(grid.q_axis, permutation), self.segments(grid.k_axis, permutation)
        return self._segments[key]
