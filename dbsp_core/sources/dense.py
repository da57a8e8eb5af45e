"""Every block: plain attention, through the same executor."""

from __future__ import annotations

from dataclasses import dataclass

from dbsp_core.mask import BlockMask
from dbsp_core.sources.base import HomeTokens, MaskRequest
from dbsp_core.sources.blocks import BlockSizes

__all__ = ["DenseSource"]


@dataclass(frozen=True)
class DenseSource(BlockSizes):
    """All blocks of all heads."""

    def mask(self, request: MaskRequest, tokens: HomeTokens | None = None) -> BlockMask:
        return BlockMask.dense(request.heads, self.grid(request))
