"""What a mask source is, and how several are asked for the mask of packed sequences."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol, cast

import numpy as np
import torch

from dbsp_core.comm.groups import SequenceGroup
from dbsp_core.layout.sequence_layout import SequenceLayout
from dbsp_core.masks.block_mask import BlockMask
from dbsp_core.masks.grid import BlockGrid
from dbsp_core.masks.video import Video
from dbsp_core.utils.errors import UserError

__all__ = [
    "BlockSizes",
    "Changes",
    "DynamicMaskSource",
    "LocalQK",
    "MaskRequest",
    "MaskSource",
    "StaticMaskSource",
    "packed_mask",
]

Changes = Literal["never", "per_step", "per_call"]
"""How often a layer's mask may change: never, from one denoising step to another, or with every q and k."""


@dataclass(frozen=True)
class MaskRequest:
    """One attention that needs a mask.

    thw:    frames, rows and columns of the video's token grid, in token order (t, h, w)
    step:   the denoising step, 0 for the first
    cfg_branch: the guidance pass, 0 for the first (classifier-free guidance runs the transformer twice a step)
    layers: how many layers the model has; None where that is not known
    """

    layer: int
    heads: int
    thw: tuple[int, int, int]
    text_tokens: int = 0
    step: int = 0
    cfg_branch: int = 0
    layers: int | None = None

    @property
    def tokens(self) -> int:
        return Video(self.thw, self.text_tokens).tokens


@dataclass(frozen=True, eq=False, repr=False)
class LocalQK:
    """The queries and keys of one attention where they are before the exchange, for masks predicted from them.

    q, k:  [B, H, n_local, D], this rank's tokens as `layout` distributes them over the ranks of `group`
    scale: of the scores
    """

    q: torch.Tensor
    k: torch.Tensor
    layout: SequenceLayout
    group: SequenceGroup
    scale: float

    @classmethod
    def alone(cls, q: torch.Tensor, k: torch.Tensor, scale: float | None = None) -> LocalQK:
        """All tokens, in one process."""
        layout = SequenceLayout.contiguous(q.shape[2], 1)
        return cls(q, k, layout, SequenceGroup(0, 1), q.shape[-1] ** -0.5 if scale is None else scale)


class MaskSource(Protocol):
    """Where masks come from: a `StaticMaskSource` or a `DynamicMaskSource`.

    The sources of db-SP are frozen dataclasses: their fields are the keys beside `source:` in a configuration.

    Attributes:
        changes: How often a layer's mask may change. "per_call" says that the source is a dynamic one.
    """

    @property
    def changes(self) -> Changes: ...

    def grid(self, request: MaskRequest) -> BlockGrid:
        """A block grid of these tokens, known before any mask is: sequence layouts are made from it.

        The masks' own grids may have other token orders.

        Raises:
            ValueError: When the request does not fit the source.
        """
        ...


class StaticMaskSource(MaskSource, Protocol):
    """Masks that are known from the request. Every rank asks for the same ones and must get the same bits."""

    def cache_key(self, request: MaskRequest) -> Hashable:
        """Requests of one video size with equal keys get equal masks, which are made once.

        Asked by each rank for itself: an error is for `grid` or `mask` to raise, which all ranks then do together.
        """
        ...

    def mask(self, request: MaskRequest) -> BlockMask:
        """The mask of the request's heads.

        Raises:
            ValueError: When the request does not fit the source.
        """
        ...


class DynamicMaskSource(MaskSource, Protocol):
    """Masks that are predicted from each attention's queries and keys, by all ranks together."""

    def mask(self, request: MaskRequest, tokens: LocalQK) -> BlockMask:
        """The mask, equal on all ranks. May use collectives of `tokens.group`.

        Returns:
            A mask of the request's heads, or of B times as many where each sample of a batch has masks of its own.

        Raises:
            ValueError: When the request does not fit the source.
        """
        ...


@dataclass(frozen=True)
class BlockSizes:
    """block_q, block_k: tokens per query and key block."""

    block_q: int = 64
    block_k: int = 64

    def __post_init__(self) -> None:
        BlockGrid(1, 0, self.block_q, self.block_k)  # raises for sizes below 1

    @property
    def changes(self) -> Changes:
        return "never"

    def cache_key(self, request: MaskRequest) -> Hashable:
        return "all layers"

    def grid(self, request: MaskRequest) -> BlockGrid:
        return BlockGrid(request.tokens, request.text_tokens, self.block_q, self.block_k, request.thw)


def packed_mask(
    sequences: Sequence[tuple[BlockGrid, MaskSource]],
    request: MaskRequest,
    tokens: LocalQK | None = None,
) -> BlockMask:
    """The mask of packed sequences, each of which asks its own source with its own size.

    Args:
        sequences: The grid and the source of each; of the grid the numbers of tokens and thw are heeded. Block sizes
            and token orders are the source's.
        request: The attention: its layer, heads and step. Its thw and text_tokens are not heeded.
        tokens: The packed queries and keys of one sample, for sources that predict from them; these are asked in turn,
            which is collective. Not needed for others.

    Raises:
        UserError: For no sequences, one without thw, a predicting source without tokens, several samples, or masks
            that can't be packed.
    """
    bounds = np.cumsum([0, *(grid.tokens for grid, _ in sequences)])
    if tokens is not None and (tokens.layout.tokens, len(tokens.q)) != (bounds[-1], 1):
        raise UserError(
            f"q of {len(tokens.q)} samples of {tokens.layout.tokens} tokens do not fit the sequences: give one sample "
            f"with their {bounds[-1]} tokens one after another"
        )
    masks = []
    for first, (grid, source) in zip(bounds, sequences, strict=False):
        if grid.thw is None:
            raise UserError(f"a sequence of {grid.tokens} tokens has no thw, which its mask source needs; give it one")
        own = replace(request, thw=grid.thw, text_tokens=grid.text_tokens)
        if source.changes != "per_call":
            masks.append(cast(StaticMaskSource, source).mask(own))
        elif tokens is None:
            raise UserError(
                "a mask source that predicts from queries and keys needs them; give packed_mask its tokens"
            )
        else:
            here = slice(first, first + grid.tokens)
            layout = SequenceLayout(
                tokens.layout.rank[here], tokens.layout.local[here], tokens.layout.world, tokens.layout.shard
            )
            masks.append(cast(DynamicMaskSource, source).mask(own, replace(tokens, layout=layout)))
    return BlockMask.packed(masks)
