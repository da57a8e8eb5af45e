"""Shards a transformer's sequence by a layout, and gathers it."""

from __future__ import annotations

import torch

from dbsp_core.comm.groups import SequenceGroup, gather_shards
from dbsp_core.layout.sequence_layout import SequenceLayout
from dbsp_core.utils.process import outside_inference


class StreamShards:
    """One stream (text or video) of a sequence: tokens `first` to `last` (exclusive) in token order.

    The layout must shard the stream into equal runs of slots, like `SequenceLayout.from_streams`.
    """

    @outside_inference
    def __init__(
        self, layout: SequenceLayout, group: SequenceGroup, first: int, last: int, device: torch.device | str = "cpu"
    ) -> None:
        self._group = group
        self.tokens = last - first
        self.shard = -(-self.tokens // layout.world)
        local = torch.from_numpy(layout.local[first:last])
        rank = torch.from_numpy(layout.rank[first:last])
        slot = rank * self.shard + local - (int(local.min()) if self.tokens else 0)
        mine = (rank == group.rank).nonzero().squeeze(1)
        self._mine = mine[slot[mine].argsort()].to(device)
        self._slot = slot.to(device)

    @property
    def tokens_here(self) -> int:
        """Number of this rank's slots with a token, which precede padding."""
        return len(self._mine)

    def take(self, full: torch.Tensor, dim: int) -> torch.Tensor:
        """Returns this rank's shard of a tensor with all tokens along `dim`; padding is zero."""
        dim = dim % full.ndim
        if full.shape[dim] != self.tokens:
            raise ValueError(f"expected {self.tokens} tokens along dimension {dim}, got shape {tuple(full.shape)}")
        here = full.index_select(dim, self._mine.to(full.device))
        padding = self.shard - self.tokens_here
        if padding == 0:
            return here
        return torch.cat([here, here.new_zeros(*full.shape[:dim], padding, *full.shape[dim + 1 :])], dim=dim)

    def gather(self, shard: torch.Tensor, dim: int) -> torch.Tensor:
        """Gathers all tokens along `dim` in token order. Collective."""
        gathered = gather_shards(shard, dim, self._group)
        return gathered.index_select(dim, self._slot.to(gathered.device))


class PackedShards:
    """Text and video of a packed sequence: a rank's shard of text, then its shard of video.

    `packed` is int64[tokens], the slot of each token among `length` slots, text first; other slots are padding.
    """

    def __init__(self, text: StreamShards, video: StreamShards, packed: torch.Tensor, length: int) -> None:
        self._text, self._video = text, video
        self._packed, self._length = packed, length

    def take(self, full: torch.Tensor, dim: int) -> torch.Tensor:
        """Returns this rank's shards of a packed tensor with all tokens along `dim`."""
        packed = full.index_select(dim, self._packed.to(full.device))
        text, video = packed.split([self._text.tokens, self._video.tokens], dim)
        return torch.cat([self._text.take(text, dim), self._video.take(video, dim)], dim)

    def gather(self, shares: torch.Tensor, dim: int) -> torch.Tensor:
        """Gathers the packed tensor along `dim`, zero at padding. Collective."""
        text, video = shares.split([self._text.shard, self._video.shard], dim)
        whole = torch.cat([self._text.gather(text, dim), self._video.gather(video, dim)], dim)
        packed = whole.new_zeros(*whole.shape[:dim], self._length, *whole.shape[dim + 1 :])
        return packed.index_copy(dim, self._packed.to(whole.device), whole)
