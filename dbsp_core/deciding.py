"""Decisions that depend on data of which every rank has a part: taken by all together, as one process would."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from dbsp_core.batches import BatchGroup
from dbsp_core.errors import UserError
from dbsp_core.groups import SequenceGroup
from dbsp_core.streams import StreamShards

__all__ = ["Together"]


class _Sharded(Protocol):
    @property
    def video(self) -> StreamShards: ...


@dataclass(frozen=True, eq=False)
class Together:
    """The ranks that run one forward pass together.

    groups:   the ranks that share the sequence, and those that share out the batch; one after the other they reach all
    sharding: tells how the video of the current pass is sharded
    """

    groups: tuple[SequenceGroup | BatchGroup, ...]
    sharding: _Sharded

    def change(self, before: torch.Tensor, now: torch.Tensor) -> tuple[float, float]:
        """(Σ |now − before|, Σ |before|) over the real tokens of all ranks; padding weighs nothing.

        before, now: [B, shard, C]
        Collective. The same bits on every rank: each sums the same parts in one order.
        Raises UserError, on all ranks, for a tensor of another shape.
        """
        video = self.sharding.video
        if before.shape != now.shape or now.ndim != 3 or now.shape[1] != video.shard:
            raise UserError(
                f"a step cache compares tensors of shape {tuple(before.shape)} and {tuple(now.shape)}, where db-SP "
                f"has shards of {video.shard} tokens; disable that cache, or enable it again after db-SP"
            )
        before, now = before[:, : video.tokens_here], now[:, : video.tokens_here]
        sums = torch.stack([(now - before).abs().sum(dtype=torch.float64), before.abs().sum(dtype=torch.float64)])
        for group in self.groups:
            sums = torch.stack(group.all_gather(sums)).sum(dim=0)
        difference, size = sums.tolist()
        return difference, size
