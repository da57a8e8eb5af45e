"""Block selectors to the contract of vLLM-Omni's development branch, of which this repeats the signatures alone."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F


class BlockSelection(NamedTuple):
    """int32 indices [B, H, query blocks, capacity], the first int32 counts [B, H, query blocks] of each row sorted."""

    indices: torch.Tensor
    counts: torch.Tensor


class LikelyBlocks:
    """Key blocks by the scores of blocks' means, until they have so much of a row's softmax; at least one."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.share = self.normalize_config(options)["share"]

    @classmethod
    def normalize_config(cls, options: dict[str, Any]) -> dict[str, Any]:
        return {"share": float(options.get("share", 0.5))}

    def prepare(self, block_size: tuple[int, int], head_size: int, device: torch.device) -> None:
        if head_size > 64:
            raise ValueError("at most 64")
        self.block_size = block_size

    def validate_request(self, query: torch.Tensor, key: torch.Tensor, protected_prefix: int) -> None:
        if protected_prefix:
            raise ValueError("no prefix")

    def select(self, query: torch.Tensor, key: torch.Tensor, scale: float, protected_prefix: int) -> BlockSelection:
        self.validate_request(query, key, protected_prefix)
        q, k = (self._means(one, block) for one, block in zip((query, key), self.block_size, strict=True))
        chances = torch.softmax((q.unsqueeze(-2) * k.unsqueeze(-3)).sum(-1) * scale, dim=-1)
        order = chances.argsort(dim=-1, descending=True, stable=True)
        before = chances.gather(-1, order).cumsum(-1) - chances.gather(-1, order)
        counts = (before < self.share).sum(-1)
        listed = torch.arange(order.shape[-1]) < counts.unsqueeze(-1)
        indices = torch.where(listed, order, order.shape[-1]).sort(-1).values
        indices[~listed] = -999  # what the contract says is ignored
        return BlockSelection(indices.to(torch.int32), counts.to(torch.int32))

    @staticmethod
    def _means(tokens: torch.Tensor, block: int) -> torch.Tensor:
        """float64[B, H, blocks, D] of [B, N, H, D]."""
        by_head = tokens.double().transpose(1, 2)
        count = by_head.shape[2]
        blocks = F.pad(by_head, (0, 0, 0, -count % block)).unflatten(2, (-1, block))
        lengths = (count - block * torch.arange(blocks.shape[2])).clamp(max=block)
        return blocks.sum(3) / lengths[:, None]


class Failing(LikelyBlocks):
    """Raises for the heads of a rank that has fewer than another."""

    def select(self, query: torch.Tensor, key: torch.Tensor, scale: float, protected_prefix: int) -> BlockSelection:
        if query.shape[2] == 1:
            raise RuntimeError("one head is too few")
        return super().select(query, key, scale, protected_prefix)


class Misshapen(LikelyBlocks):
    """Forgets the counts' last dimension."""

    def select(self, query: torch.Tensor, key: torch.Tensor, scale: float, protected_prefix: int) -> BlockSelection:
        found = super().select(query, key, scale, protected_prefix)
        return BlockSelection(found.indices, found.counts[..., 0])
