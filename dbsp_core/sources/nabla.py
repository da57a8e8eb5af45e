"""NABLA, Kandinsky 5's own mask: a window of tiles and what pooled attention predicts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from dbsp_core.masks.block_mask import BlockMask
from dbsp_core.masks.grid import BlockGrid
from dbsp_core.sources.base import BlockSizes, Changes, LocalQK, MaskRequest
from dbsp_core.sources.sparge import SpargeSource
from dbsp_core.sources.union import UnionSource
from dbsp_core.sources.window import Sizes, WindowSource

__all__ = ["NablaSource"]

TILE = (1, 8, 8)
USUAL_CDF = 0.9
USUAL_WINDOW = (11, 3, 3)
"""Those of Kandinsky 5's checkpoints for ten seconds."""


@dataclass(frozen=True)
class NablaSource(BlockSizes):
    """NABLA (Mikhailov et al., 2025, arXiv:2507.13546, Alg. 1): a union of two sources in order "tile:1x8x8".

    A block of 64 queries, 8 × 8 places of a frame, keeps the fewest blocks whose pooled attention is more than `cdf`,
    as `SpargeSource` with crossing and without similarity; and the tiles around its own, as `WindowSource` not
    shifted.

    Attributes:
        cdf: P. None: that of the model's checkpoint, if it has NABLA, or 0.9.
        window: Frames, and rows and columns of tiles (wT, wH, wW). None: the checkpoint's, or [11, 3, 3].
    """

    cdf: float | None = None
    window: Sizes | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._union  # noqa: B018  raises for values out of range

    @property
    def changes(self) -> Changes:
        return "per_call"

    def or_else(self, checkpoint: NablaSource) -> NablaSource:
        """This source with what is not set of it from a checkpoint's."""
        cdf = checkpoint.cdf if self.cdf is None else self.cdf
        return replace(self, cdf=cdf, window=checkpoint.window if self.window is None else self.window)

    def grid(self, request: MaskRequest) -> BlockGrid:
        return self._union.grid(request)

    def mask(self, request: MaskRequest, tokens: LocalQK) -> BlockMask:
        """Predicts the mask. Collective."""
        return self._union.mask(request, tokens)

    @cached_property
    def _union(self) -> UnionSource:
        sizes, order = (self.block_q, self.block_k), "tile:{}x{}x{}".format(*TILE)
        near = WindowSource(*sizes, USUAL_WINDOW if self.window is None else self.window, TILE, shifted=False)
        cdf = USUAL_CDF if self.cdf is None else self.cdf
        return UnionSource((near, SpargeSource(*sizes, cdf, similarity=-1.0, token_order=order, crossing=True)))
