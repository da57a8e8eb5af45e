"""One attention, distributed over workers, against the dense oracle."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import numpy as np
import torch

from dbsp_core import BlockGrid, BlockMask, DualBalancedAttention, SequenceGroup, SequenceLayout, Strategy, make_plan
from dbsp_core.layout.sequence_layout import Streams
from dbsp_core.planning.chunks import NEEDED, Chunks
from dbsp_core.planning.comm_dtype import CommDtype, read_comm_dtype
from dbsp_core.planning.plan import Plan
from tests.support.oracle import rounded_to_int8
from tests.support.shared import shared

RUBBISH = 1e4  # fills padding, which must not be seen


@dataclass(frozen=True)
class Case:
    """One attention. Everything random comes from `seed`; `sabotage` names a negative control.

    planner: a planner's name, or "random" for any owner and any chunk, per head
    band: whether rows attend only to keys somewhat behind them, further behind in some heads than in others
    whole_tiles: see `BlockGrid`;  dense_heads: number of heads, the last ones, whose every block is active
    absent: whether rows have absent keys, but for some
    """

    strategy: str
    planner: str = "dbsp"
    heads: int = 3
    tokens: int = 203
    text_tokens: int = 0
    block_q: int = 16
    block_k: int = 16
    batch: int = 1
    head_dim: int = 16
    density: float = 0.4
    layout: str = "contiguous"
    streams: Streams = None
    padded: bool = False
    kernel: str = "auto"
    seed: int = 0
    sabotage: str | None = None
    thw: tuple[int, int, int] | None = None
    orders: tuple[str, ...] = ("thw",)
    dtype: torch.dtype = torch.float32
    keys: str = "all"
    band: bool = False
    precision: str | CommDtype = "model"
    whole_tiles: bool = False
    debug: bool = True
    dense_heads: int = 0
    absent: bool = False

    @property
    def grid(self) -> BlockGrid:
        sizes = self.tokens, self.text_tokens, self.block_q, self.block_k, self.thw, self.orders
        return BlockGrid(*sizes, whole_tiles=self.whole_tiles)

    @property
    def attention(self) -> Case:
        """The part that decides about results, whichever way they are computed: equal for cases with one reference."""
        return Case("-", **{name: getattr(self, name) for name in _OF_ATTENTION})


_WAYS = {
    *("strategy", "planner", "layout", "streams", "padded", "kernel", "sabotage", "keys", "debug"),
}
_OF_ATTENTION = [field.name for field in fields(Case) if field.name not in _WAYS]


def random_mask(case: Case, grid: BlockGrid) -> BlockMask:
    """Draws a mask: asymmetric, unequal over heads, rows and columns, with rows and columns that are empty."""
    rng = np.random.default_rng(case.seed)
    head = rng.uniform(0.3, 1.7, case.heads)[:, None, None]
    row, column = rng.uniform(0.2, 1.8, (2, max(grid.nq, grid.nk)))
    bits = rng.random((case.heads, grid.nq, grid.nk)) < (
        case.density * head * row[None, : grid.nq, None] * column[None, None, : grid.nk]
    )
    if case.band:
        behind = np.arange(grid.nk) / grid.nk - np.arange(grid.nq)[:, None] / grid.nq - head * 0.2 + 0.1
        bits = (behind > 0) & (behind < case.density * head)
    bits[rng.random((case.heads, grid.nq)) < 0.1] = False
    bits[:, :, rng.integers(grid.nk)] = False
    bits[case.heads - case.dense_heads :] = True
    return BlockMask(bits, grid, absent=absent_keys(case.heads, grid, case.seed) if case.absent else None)


def absent_keys(heads: int, grid: BlockGrid, seed: int) -> torch.Tensor:
    """Draws log-sum-exps of absent keys, from a few to as many as all others, and none in a tenth of the rows."""
    rng = np.random.default_rng([seed, 1])
    scores = rng.uniform(-1, 6, (heads, grid.nq))
    return torch.from_numpy(np.where(rng.random(scores.shape) < 0.1, -np.inf, scores).astype(np.float32))


@dataclass(frozen=True)
class Inputs:
    """A case on one rank. full: q, k, v of all tokens; local: this rank's; mine, slots: its tokens, and their slots"""

    mask: BlockMask
    layout: SequenceLayout
    full: list[torch.Tensor]
    local: list[torch.Tensor]
    mine: torch.Tensor
    slots: torch.Tensor

    @classmethod
    def from_case(cls, case: Case, rank: int) -> Inputs:
        mask, full = whole(case.attention)
        layout = _layout(case.attention, case.strategy, case.layout, case.streams)
        local, mine, slots = shards(full, layout, rank, case.padded)
        return cls(mask, layout, full, local, mine, slots)


def shards(
    full: list[torch.Tensor], layout: SequenceLayout, rank: int, padded: bool
) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
    """Returns a rank's part of tensors [B, H, N, D], rubbish at padding; its tokens, and their positions there."""
    mine, positions = (torch.from_numpy(one) for one in layout.tokens_at(rank))
    n_local = layout.shard if padded else int(layout.tokens_at(rank)[1].max(initial=-1)) + 1
    local = [torch.full((*one.shape[:2], n_local, one.shape[3]), RUBBISH, dtype=one.dtype) for one in full]
    for here, everywhere in zip(local, full, strict=True):
        here[:, :, positions] = everywhere[:, :, mine]
    return local, mine, positions


def at_padding(local: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Returns the part of a rank's [B, H, n, D] that is at none of the positions of its tokens."""
    padding = torch.ones(local.shape[2], dtype=torch.bool)
    padding[positions] = False
    return local[:, :, padding]


@shared
def whole(attention: Case) -> tuple[BlockMask, list[torch.Tensor]]:
    """Returns mask and q, k, v of all tokens, which are not to be changed."""
    generator = torch.Generator().manual_seed(attention.seed)
    shape = (attention.batch, attention.heads, attention.tokens, attention.head_dim)
    full = [torch.randn(shape, generator=generator, dtype=attention.dtype) for _ in range(3)]
    return random_mask(attention, attention.grid), full


@shared
def _layout(attention: Case, strategy: str, name: str, streams: Streams) -> SequenceLayout:
    return SequenceLayout.named(name, attention.grid, Strategy.parse(strategy), streams=streams)


def as_sent(case: Case, full: list[torch.Tensor]) -> list[torch.Tensor]:
    """Returns q, k and v as owners have them, but for what is subtracted from all keys identically."""
    return rounded_to_int8(*full) if read_comm_dtype(case.precision).is_int8 else full


def attend(
    case: Case, mask: BlockMask, layout: SequenceLayout, local: list[torch.Tensor], scale: float = 1.0
) -> torch.Tensor:
    """Computes the distributed attention of a case, sabotaged if it says so. scale: 1, but for a negative control"""
    strategy = Strategy.parse(case.strategy)
    if case.sabotage == "token order off by one":
        layout = replace(layout, rank=np.roll(layout.rank, 1), local=np.roll(layout.local, 1))
    planner = "contiguous" if case.planner == "random" else case.planner
    plan = make_plan(mask, strategy, planner, layout=layout, keys=case.keys, precision=case.precision)
    if case.planner == "random":
        plan = random_owners(plan, mask, case.seed)
    executor = DualBalancedAttention.prepare(
        plan, mask, layout, SequenceGroup.from_group(), n_local=local[0].shape[2], kernel=case.kernel, debug=case.debug
    )
    if case.sabotage == "wrong order of chunks":
        tables = executor.prepared.tables
        order = [0, *range(len(tables.bits) - 1, 0, -1)]
        swapped = {name: getattr(tables, name)[order] for name in ("bits", "kv_count", "kv_full")}
        executor = replace(executor, prepared=replace(executor.prepared, tables=replace(tables, **swapped)))
    return executor(*local, scale=scale * case.head_dim**-0.5)


def random_owners(like: Plan, mask: BlockMask, seed: int) -> Plan:
    """Draws any owner of any row; blocks come in any chunk, other ones in heads whose token orders differ."""
    rng, strategy, grid = np.random.default_rng(seed), like.strategy, like.grid
    owner = rng.integers(strategy.world, size=like.owner.shape)
    ring_row = np.empty((like.heads, grid.nk), dtype=np.int64)
    for _, heads in grid.order_groups(like.heads):
        ring_row[heads] = rng.integers(strategy.ring, size=grid.nk)
    if like.chunks.keys == NEEDED:
        return replace(like, owner=owner, chunks=Chunks.of_rows(owner, ring_row, strategy, mask))
    return replace(like, owner=owner, chunks=Chunks.of_heads(owner, ring_row, strategy))
