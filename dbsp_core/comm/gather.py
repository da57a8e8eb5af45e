"""Gathering shards so that gradients flow back through it."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from dbsp_core.comm.groups import SequenceGroup

__all__ = ["gather_shards"]


def gather_shards(shard: torch.Tensor, dim: int, group: SequenceGroup) -> torch.Tensor:
    """Every rank's shard, by rank, along `dim`; all of one shape. Collective.

    Backward gives each rank its own shard's part and sends nothing: every rank computes the whole loss from the whole
    output. What a rank's parameters then have for gradients is their part of a sum over the group.
    """
    if group.size == 1:
        return shard
    gathered: torch.Tensor = _Gather.apply(shard, dim % shard.ndim, group)
    return gathered


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, shard: torch.Tensor, dim: int, group: SequenceGroup) -> torch.Tensor:
        ctx.dim, ctx.first, ctx.size = dim, group.rank * shard.shape[dim], shard.shape[dim]
        return torch.cat(group.all_gather(shard), dim=dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return gradient.narrow(ctx.dim, ctx.first, ctx.size), None, None
