"""Home layouts: which rank holds which tokens outside attention, and in which order."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from dbsp_core.grid import BlockAxis, BlockGrid
from dbsp_core.strategy import Strategy

__all__ = ["HOME_LAYOUTS", "Fragments", "HomeLayout"]


@dataclass(frozen=True, eq=False)
class Fragments:
    """The pieces that homes cut blocks into: each is a run of one block's tokens that lie together on one rank.

    Sorted by (block, offset); every token is in exactly one fragment. All int64[F]:
    block:  the block
    offset: first token's place within the block
    rank:   the rank that holds the run
    local:  first token's place among that rank's tokens
    length: tokens in the run
    """

    block: np.ndarray
    offset: np.ndarray
    rank: np.ndarray
    local: np.ndarray
    length: np.ndarray

    def tokens_by_ring(self, blocks: int, strategy: Strategy) -> np.ndarray:
        """int64[blocks, ring]: tokens of each block that live on each ring rank."""
        tokens = np.zeros((blocks, strategy.ring), dtype=np.int64)
        np.add.at(tokens, (self.block, self.rank // strategy.ulysses), self.length)
        return tokens


@dataclass(frozen=True, eq=False)
class HomeLayout:
    """Tokens laid out in `order` and cut into `world` equal shards; the last shards may hold padding, or nothing.

    order: int64[tokens], the token-order position of each token as the sequence is sharded
    world: number of ranks
    """

    order: np.ndarray
    world: int
    name: str = "custom"

    def __post_init__(self) -> None:
        if self.world < 1:
            raise ValueError(f"a home layout needs at least one rank, got {self.world}")
        if not np.array_equal(np.sort(self.order), np.arange(len(self.order))):
            raise ValueError("a home layout's order must name every token exactly once")

    @classmethod
    def contiguous(cls, tokens: int, world: int) -> HomeLayout:
        """Tokens stay in token order: what both hosts do."""
        return cls(np.arange(tokens), world, "contiguous")

    @classmethod
    def striped(cls, grid: BlockGrid, strategy: Strategy) -> HomeLayout:
        """Block b lives on ring rank b mod y (up to equal shards), so that profiles average out over the ring."""
        axis = grid.q_axis if grid.block_q >= grid.block_k else grid.k_axis
        stripe = axis.block_of % strategy.ring
        return cls(np.argsort(stripe, kind="stable"), strategy.world, "striped")

    @property
    def tokens(self) -> int:
        return len(self.order)

    @property
    def shard(self) -> int:
        """Tokens per rank, padding included: ceil(tokens / world)."""
        return -(-self.tokens // self.world)

    @property
    def is_identity(self) -> bool:
        """Whether the host's own sequence order is kept."""
        return bool(np.array_equal(self.order, np.arange(self.tokens)))

    def local_order(self, rank: int) -> np.ndarray:
        """int64[n]: token-order positions of the real tokens of `rank`, in the order in which it holds them."""
        return self.order[rank * self.shard : (rank + 1) * self.shard]

    @cached_property
    def _place(self) -> np.ndarray:
        """int64[tokens]: where each token stands in the sharded sequence."""
        place = np.empty(self.tokens, dtype=np.int64)
        place[self.order] = np.arange(self.tokens)
        return place

    def fragments(self, axis: BlockAxis) -> Fragments:
        """The runs that this layout and the blocks of `axis` cut the tokens into."""
        rank, local = np.divmod(self._place, self.shard)
        block = axis.block_of
        breaks = (np.diff(block) != 0) | (np.diff(rank) != 0) | (np.diff(local) != 1)
        first = np.concatenate([[0], np.flatnonzero(breaks) + 1])
        length = np.diff(first, append=self.tokens)
        return Fragments(block[first], first - axis.starts[block[first]], rank[first], local[first], length)


HOME_LAYOUTS = {
    "contiguous": lambda grid, strategy: HomeLayout.contiguous(grid.tokens, strategy.world),
    "striped": HomeLayout.striped,
}
