"""What most sources share: block sizes, and one mask for all layers and steps."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from dbsp_core.grid import BlockGrid
from dbsp_core.sources.base import MaskRequest, Varies

__all__ = ["BlockSizes"]


@dataclass(frozen=True)
class BlockSizes:
    """block_q, block_k: tokens per query and key block."""

    block_q: int = 64
    block_k: int = 64

    def __post_init__(self) -> None:
        BlockGrid(1, 0, self.block_q, self.block_k)  # raises for sizes below 1

    @property
    def varies(self) -> Varies:
        return "never"

    def version(self, request: MaskRequest) -> Hashable:
        return "all layers"

    def grid(self, request: MaskRequest) -> BlockGrid:
        return BlockGrid(request.tokens, request.text_tokens, self.block_q, self.block_k, request.thw)
