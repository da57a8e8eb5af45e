"""What the workers run: mask sources that fail, or that answer differently, on one rank only."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from dbsp_core import BlockGrid, BlockMask, SequenceGroup
from dbsp_core.config import DbspConfig
from dbsp_core.layout.strategy import Strategy
from dbsp_core.masks.grid import Video
from dbsp_core.masks.steps import DenseSchedule
from dbsp_core.runtime.mask_provider import MaskProvider
from dbsp_core.runtime.session import AttentionSession
from dbsp_core.sources import MaskRequest
from dbsp_core.sources.base import BlockSizes
from dbsp_core.utils.errors import UserError


@dataclass(frozen=True)
class OddOneOut(BlockSizes):
    """Everybody's mask is dense; `rank` does else: "grid", "mask", "bug" (raise), "bits" (differ) or "heads"."""

    rank: int = 0
    fault: str = "mask"

    def grid(self, request: MaskRequest) -> BlockGrid:
        if self._odd("grid"):
            raise UserError("the file is broken here")
        return super().grid(request)

    def mask(self, request: MaskRequest) -> BlockMask:
        if self._odd("mask"):
            raise UserError("the file is broken here")
        if self._odd("bug"):
            raise KeyError("layer 7")
        mask = BlockMask.dense(request.heads - self._odd("heads"), self.grid(request))
        if self._odd("bits"):
            mask.bits[0, 0, 0] = False
        return mask

    def _odd(self, fault: str) -> bool:
        return self.fault == fault and dist.get_rank() == self.rank


def attend_with(rank: int, world: int, source: BlockSizes) -> None:
    """One attention; afterwards a collective, which would hang or fail if ranks were not together."""
    session = AttentionSession(
        DbspConfig(mask=source), SequenceGroup.from_group(), Strategy(world, 1), heads=world, layers=1
    )
    try:
        layout = session.begin(Video((2, 4, 8)))
        q = torch.ones(1, world, layout.shard, 16)
        session.attend(0, q, q, q)
    finally:
        dist.barrier()


@dataclass(frozen=True)
class Forgetful(BlockSizes):
    """Its masks never change, but in the second step rank `rank` cannot name them."""

    changes = "per_step"
    rank: int = 0

    def cache_key(self, request: MaskRequest) -> str:
        if request.step == 1 and dist.get_rank() == self.rank:
            raise ValueError("the table of contents is gone")
        return "always the same"

    def mask(self, request: MaskRequest) -> BlockMask:
        return BlockMask.dense(request.heads, self.grid(request))


def attend_in_two_steps(rank: int, world: int, odd: int) -> None:
    """The others keep the first step's mask, so that they have nothing to agree on in the second."""
    source = Forgetful(block_q=16, block_k=16, rank=odd)
    session = AttentionSession(
        DbspConfig(mask=source), SequenceGroup.from_group(), Strategy(world, 1), heads=world, layers=1
    )
    try:
        for timestep in (900.0, 800.0):
            layout = session.begin(Video((2, 4, 8)), timestep=timestep)
            q = torch.ones(1, world, layout.shard, 16)
            session.attend(0, q, q, q)
    finally:
        dist.barrier()


def dense_moments(schedule: DenseSchedule, layers: int, timesteps: list[float], steps: int) -> list[list[int]]:
    """By forward pass, the layers that are dense."""
    feed = MaskProvider(BlockSizes(), schedule, 2, layers, lambda: steps)
    dense = []
    for timestep in timesteps:
        feed.begin([Video((2, 2, 2))], torch.tensor([timestep, timestep]))
        dense.append([layer for layer in range(layers) if feed.cache_key(layer) == "dense by schedule"])
    return dense
