"""Every block: plain attention, through the same executor."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from dbsp_core.grid import BlockGrid
from dbsp_core.mask import BlockMask
from dbsp_core.sources.base import MaskRequest
from dbsp_core.sources.blocks import BlockSizes

__all__ = ["DenseSource"]


@dataclass(frozen=True)
class DenseSource(BlockSizes):
    """All blocks of all heads."""

    def mask(self, request: MaskRequest) -> BlockMask:
        return _mask(request.heads, self.grid(request))


@functools.lru_cache(maxsize=1)  # all layers share one mask, hence one plan
def _mask(heads: int, grid: BlockGrid) -> BlockMask:
    return BlockMask.dense(heads, grid)
