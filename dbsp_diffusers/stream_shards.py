"""Sharding a transformer's sequence by a layout, and gathering it again."""

from __future__ import annotations

import torch

from dbsp_core.comm.groups import SequenceGroup
from dbsp_core.layout.sequence_layout import SequenceLayout

__all__ = ["StreamShards"]


class StreamShards:
    """One stream (text, or video) of a sequence: the tokens `first` to `last`, exclusive, in token order.

    Made from a layout that shards the stream into equal runs of places, as `SequenceLayout.from_streams` does.
    """

    def __init__(self, layout: SequenceLayout, group: SequenceGroup, first: int, last: int) -> None:
        self._group = group
        self.tokens = last - first
        self.shard = -(-self.tokens // layout.world)
        local = torch.from_numpy(layout.local[first:last])
        rank = torch.from_numpy(layout.rank[first:last])
        start = int(local.min()) if self.tokens else 0
        self._place = rank * self.shard + local - start
        self._mine = rank == group.rank

    @property
    def tokens_here(self) -> int:
        """How many of this rank's places hold a token; they are the first ones, padding follows."""
        return int(self._mine.sum())

    def take(self, full: torch.Tensor, dim: int) -> torch.Tensor:
        """This rank's shard of a tensor that has all tokens along `dim`; padding is zero."""
        dim = dim % full.ndim
        if full.shape[dim] != self.tokens:
            raise ValueError(f"expected {self.tokens} tokens along dimension {dim}, got shape {tuple(full.shape)}")
        tokens = self._mine.nonzero().squeeze(1).to(full.device)
        places = (self._place[self._mine] - self._group.rank * self.shard).to(full.device)
        shard = full.new_zeros(*full.shape[:dim], self.shard, *full.shape[dim + 1 :])
        return shard.index_copy_(dim, places, full.index_select(dim, tokens))

    def gather(self, shard: torch.Tensor, dim: int) -> torch.Tensor:
        """All tokens along `dim`, in token order, from every rank's shard. Collective."""
        gathered = torch.cat(self._group.all_gather(shard), dim=dim)
        return gathered.index_select(dim, self._place.to(gathered.device))
