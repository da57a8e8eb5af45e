"""Protocol and base classes of mask sources, and masks of packed sequences."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, Protocol

import numpy as np
import torch

from dbsp_core.comm.groups import SequenceGroup
from dbsp_core.layout.sequence_layout import SequenceLayout
from dbsp_core.masks.block_mask import BlockMask
from dbsp_core.masks.grid import CANONICAL, BlockGrid, Video, require_order
from dbsp_core.utils.errors import SettingError, UserError, blame_setting, require_value

Changes = Literal["never", "per_step", "per_call"]
"""How often a layer's mask may change: never, between denoising steps, or at every call (predicted from q and k)."""

DenseText = bool | Literal["rows", "columns"]
"""Whether rows and columns of text are dense: both, neither, or one; otherwise predicted like the video's."""

ByStep = float | tuple[float, ...]
"""A number, or one per denoising step; the last applies to all later steps."""

LARGEST_BLOCK = 1 << 16  # limit of `sum_tokens`


@dataclass(frozen=True)
class MaskRequest:
    """One attention that needs a mask."""

    layer: int
    heads: int
    thw: tuple[int, int, int]  # Frames, rows and columns of the video's token grid
    text_tokens: int = 0
    step: int = 0  # The denoising step, from 0
    cfg_branch: int = 0  # The CFG pass, from 0
    layers: int | None = None  # Number of the model's layers, if known
    text_runs: tuple[int, ...] = ()  # Tokens of each kind of text, if the model has several; see `Video`

    @property
    def tokens(self) -> int:
        return Video(self.thw, self.text_tokens).tokens


@dataclass(frozen=True, eq=False, repr=False)
class LocalQK:
    """A rank's queries and keys of one attention, [B, H, n_local, D], before the exchange."""

    q: torch.Tensor
    k: torch.Tensor
    layout: SequenceLayout  # Distribution of tokens over the ranks of `group`
    group: SequenceGroup
    scale: float  # Softmax scale
    v: torch.Tensor | None = None  # Values, for sources with a branch, or None
    # The model's input to the source's branch: for vsa a factor of q's shape; for sla the projection of zeros and of
    # each unit channel, [D + 1, D]; None: none
    gate: torch.Tensor | None = None

    @classmethod
    def alone(
        cls,
        q: torch.Tensor,
        k: torch.Tensor,
        scale: float | None = None,
        v: torch.Tensor | None = None,
        gate: torch.Tensor | None = None,
    ) -> LocalQK:
        """Returns the tokens of a single process."""
        layout = SequenceLayout.contiguous(q.shape[2], 1)
        return cls(q, k, layout, SequenceGroup(0, 1), q.shape[-1] ** -0.5 if scale is None else scale, v, gate)


class MaskSource(Protocol):
    """Makes masks. Every rank makes the same requests and must get identical bits.

    db-SP's sources are frozen dataclasses, whose fields are their settings. `grid` and `mask` raise ValueError if a
    request does not fit the source.

    Attributes:
        changes: How often a layer's mask changes; "per_call" if and only if it is predicted from q and k.
    """

    @property
    def changes(self) -> Changes: ...

    def grid(self, request: MaskRequest) -> BlockGrid:
        """Returns the request's block grid, for sequence layouts; masks may have other token orders."""
        ...

    def cache_key(self, request: MaskRequest) -> Hashable:
        """Returns a key that is equal for equal masks within one video size. Not called for "per_call" sources.

        Must not raise: only errors of `grid` and `mask` are raised on all ranks.
        """
        ...

    @property
    def mask(self) -> Callable[..., BlockMask]:
        """Method mask(request), or mask(request, tokens) if predicted from `LocalQK`.

        The latter is called on all ranks and may use collectives of `tokens.group`. It returns a mask of the request's
        heads, or of B · H heads with masks per batch item.
        """
        ...


@functools.lru_cache(maxsize=16)
def _block_grid(thw: tuple[int, int, int], text_tokens: int, block_q: int, block_k: int, **others: Any) -> BlockGrid:
    """Makes a grid, cached so that all attentions of a video size share its axes."""
    return BlockGrid(math.prod(thw) + text_tokens, text_tokens, block_q, block_k, thw, **others)


@dataclass(frozen=True)
class BlockSizes:
    """Base of mask sources with block sizes `block_q` and `block_k` in tokens."""

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
        return _block_grid(request.thw, request.text_tokens, self.block_q, self.block_k)

    def _tile_grid(
        self, request: MaskRequest, tile: tuple[int, int, int], whole_tiles: bool = True, **others: Any
    ) -> BlockGrid:
        """Returns the request's grid in tile order; with `whole_tiles` blocks do not mix tiles."""
        whole_tiles = whole_tiles and any(size % side for size, side in zip(request.thw, tile, strict=True))
        others |= {"orders": ("tile:{}x{}x{}".format(*tile),), "whole_tiles": whole_tiles}
        return _block_grid(request.thw, request.text_tokens, self.block_q, self.block_k, **others)


@dataclass(frozen=True)
class PredictedSource(BlockSizes):
    """Base of mask sources that predict each mask from queries and keys.

    Attributes:
        dense_text: Which of text's rows and columns are dense; see `DenseText`.
        scheduled: Fields that may have a number per denoising step; see `ByStep`.
        approximates_dense: True if models are not trained with these masks, so that dense attention may replace them.
    """

    dense_text: DenseText = field(default=True, kw_only=True)
    changes: ClassVar[Changes] = "per_call"
    scheduled: ClassVar[tuple[str, ...]] = ()
    approximates_dense: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        is_known = self.dense_text in (True, False, "rows", "columns")
        require_value(self, "dense_text", is_known, "must be rows, columns, true or false")
        for name in ("block_q", "block_k"):
            if getattr(self, name) > LARGEST_BLOCK:
                message = f"predicted masks have blocks of at most {LARGEST_BLOCK} tokens; 64 is usual"
                raise SettingError(message, (name,))

    @property
    def by_step(self) -> bool:
        """True if a setting changes by denoising step."""
        return any(isinstance(getattr(self, name), tuple) for name in self.scheduled)

    def _at_step(self, name: str, step: int) -> Any:
        """Returns the value of a `ByStep` field at a denoising step, or None if the field is None."""
        value = getattr(self, name)
        return value[min(step, len(value) - 1)] if isinstance(value, tuple) else value

    def _require_each(self, name: str, allowed: Callable[[float], bool], message: str) -> None:
        """Raises SettingError unless a `ByStep` has numbers and all are allowed."""
        value = getattr(self, name)
        values = value if isinstance(value, tuple) else (value,)
        require_value(self, name, bool(values) and all(map(allowed, values)), message)


@dataclass(frozen=True)
class OrderedSource(PredictedSource):
    """Base of predicted masks in any token order.

    Attributes:
        attention_sink: True to keep the first key block in every row.
        token_order: Token order that is cut into blocks; see `dbsp_core.masks.grid`.
    """

    attention_sink: bool = field(default=False, kw_only=True)
    token_order: str = field(default=CANONICAL, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        with blame_setting("token_order"):
            require_order(self.token_order)

    def grid(self, request: MaskRequest) -> BlockGrid:
        return _block_grid(request.thw, request.text_tokens, self.block_q, self.block_k, orders=(self.token_order,))


def kept_blocks(wanted: float, blocks: int, *, round_up: bool = False, multiple: int = 1) -> int:
    """Rounds `wanted` blocks of a row to a multiple, between one and all `blocks`."""
    rounded = (math.ceil if round_up else math.floor)(wanted / multiple) * multiple
    return min(blocks, max(multiple, rounded))


def packed_mask(
    sequences: Sequence[tuple[BlockGrid, MaskSource]],
    request: MaskRequest,
    tokens: LocalQK | None = None,
) -> BlockMask:
    """Makes the mask of packed sequences, each with its own source and size. Collective for predicted masks.

    Args:
        sequences: Grid and source of each sequence. Of the grid only token counts and thw are used.
        request: The attention; its layer, heads and step are used.
        tokens: Packed queries and keys of one sample, required by predicted masks.

    Raises:
        UserError: No sequences, one without thw, a predicted mask without tokens, several samples, or masks that
            cannot be packed.
    """
    bounds = np.cumsum([0, *(grid.tokens for grid, _ in sequences)])
    if tokens is not None and (tokens.layout.tokens, len(tokens.q)) != (bounds[-1], 1):
        raise UserError(
            f"q of {len(tokens.q)} samples of {tokens.layout.tokens} tokens do not fit the sequences; pass one sample "
            f"with their {bounds[-1]} tokens concatenated"
        )
    masks = []
    for first, (grid, source) in zip(bounds, sequences, strict=False):
        if grid.thw is None:
            raise UserError(
                f"a sequence of {grid.tokens} tokens has no thw, which its mask source needs; set thw in its grid"
            )
        sequence_request = replace(request, thw=grid.thw, text_tokens=grid.text_tokens, text_runs=grid.text_runs)
        if source.changes != "per_call":
            masks.append(source.mask(sequence_request))
        elif tokens is None:
            raise UserError("predicted masks need queries and keys; pass tokens to packed_mask")
        else:
            here = slice(first, first + grid.tokens)
            layout = SequenceLayout(
                tokens.layout.rank[here], tokens.layout.local[here], tokens.layout.world, tokens.layout.shard
            )
            masks.append(source.mask(sequence_request, replace(tokens, layout=layout)))
    return BlockMask.packed(masks)
