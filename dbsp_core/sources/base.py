"""What a mask source is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from dbsp_core.grid import BlockGrid
from dbsp_core.mask import BlockMask

__all__ = ["MaskRequest", "MaskSource"]


@dataclass(frozen=True)
class MaskRequest:
    """One attention that needs a mask.

    thw:  frames, rows and columns of the video's token grid, in token order (t, h, w)
    call: how often this layer's mask was asked for before, 0 for the first; static sources are asked once
    """

    layer: int
    heads: int
    thw: tuple[int, int, int]
    text_tokens: int = 0
    call: int = 0

    @property
    def tokens(self) -> int:
        frames, height, width = self.thw
        return self.text_tokens + frames * height * width


class MaskSource(Protocol):
    """Where masks come from. Every rank asks for the same request and must get the same bits.

    Sources are frozen dataclasses: their fields are the keys that may stand beside `source:` in a configuration.
    static: whether a layer's mask is the same at every call
    """

    @property
    def static(self) -> bool: ...

    def grid(self, request: MaskRequest) -> BlockGrid:
        """The block grid of the mask, known before the mask is: home layouts are made from it."""
        ...

    def mask(self, request: MaskRequest) -> BlockMask:
        """The mask. Raises ValueError when the request does not fit the source."""
        ...
