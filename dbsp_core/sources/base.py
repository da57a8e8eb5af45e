"""The protocols of mask sources, and the mask of packed sequences, each from its own source."""

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
"""How often a layer's mask may change: never, from one denoising step to another, or with every q and k."""

DenseText = bool | Literal["rows", "columns"]
"""Which rows and columns of text are dense: both, neither, or one of them. Others are predicted as the video's are."""

ByStep = float | tuple[float, ...]
"""A number, or one for each denoising step from the first on; the last is that of all later steps."""

LARGEST_BLOCK = 1 << 16  # tokens whose sum `sum_tokens` can hold


@dataclass(frozen=True)
class MaskRequest:
    """One attention that needs a mask.

    Attributes:
        thw: Frames, rows and columns of the video's token grid.
        step: The denoising step, from 0.
        cfg_branch: The CFG pass, from 0: classifier-free guidance runs the transformer twice a step.
        layers: Number of the model's layers, if known.
        text_runs: Tokens of each kind of text, where the model distinguishes; see `Video`.
    """

    layer: int
    heads: int
    thw: tuple[int, int, int]
    text_tokens: int = 0
    step: int = 0
    cfg_branch: int = 0
    layers: int | None = None
    text_runs: tuple[int, ...] = ()

    @property
    def tokens(self) -> int:
        return Video(self.thw, self.text_tokens).tokens


@dataclass(frozen=True, eq=False, repr=False)
class LocalQK:
    """A rank's queries and keys of one attention, [B, H, n_local, D], before they are sent to owners.

    Attributes:
        layout: The distribution of tokens over the ranks of `group`.
        scale: Factor of the scores.
        v: Its values, for sources that make more of them than a mask; None: not given.
        gate: What the model has for the branch that a source adds: for vsa a factor of their shape, for sla its
            projection of zeros and of each channel alone, [D + 1, D]; None: nothing.
    """

    q: torch.Tensor
    k: torch.Tensor
    layout: SequenceLayout
    group: SequenceGroup
    scale: float
    v: torch.Tensor | None = None
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
        """Returns all tokens of one process."""
        layout = SequenceLayout.contiguous(q.shape[2], 1)
        return cls(q, k, layout, SequenceGroup(0, 1), q.shape[-1] ** -0.5 if scale is None else scale, v, gate)


class MaskSource(Protocol):
    """Makes the masks of attentions. Every rank makes the same requests and must get identical bits.

    The sources of db-SP are frozen dataclasses, whose fields are the keys next to `source:` in a configuration.
    `grid` and `mask` raise ValueError when the request does not fit the source.

    Attributes:
        changes: Frequency with which a layer's mask changes; "per_call" if and only if it is predicted from q and k.
    """

    @property
    def changes(self) -> Changes: ...

    def grid(self, request: MaskRequest) -> BlockGrid:
        """Returns the block grid of the request's tokens, from which sequence layouts are made before there is a mask.

        Masks may have grids with other token orders.
        """
        ...

    def cache_key(self, request: MaskRequest) -> Hashable:
        """Returns a key that requests with equal masks share, within one video size. Not asked "per_call".

        Must not raise: ranks raise together only what `grid` or `mask` raises.
        """
        ...

    @property
    def mask(self) -> Callable[..., BlockMask]:
        """Method mask(request), or mask(request, tokens) if the mask is predicted from `LocalQK`.

        The latter is called by all ranks together and may use collectives of `tokens.group`. It returns a mask of the
        request's heads, or of B times as many where each sample of a batch has masks of its own.
        """
        ...


@functools.lru_cache(maxsize=16)
def _block_grid(thw: tuple[int, int, int], text_tokens: int, block_q: int, block_k: int, **others: Any) -> BlockGrid:
    """Makes a grid, or returns one that was made before: all attentions of a video size share its axes."""
    return BlockGrid(math.prod(thw) + text_tokens, text_tokens, block_q, block_k, thw, **others)


@dataclass(frozen=True)
class BlockSizes:
    """Base of mask sources: the tokens of a query block and of a key block."""

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
        return self._grid(request)

    def _grid(self, request: MaskRequest, **others: Any) -> BlockGrid:
        """Returns the request's grid in these blocks, with `others` of its fields."""
        return _block_grid(request.thw, request.text_tokens, self.block_q, self.block_k, **others)

    def _tile_grid(
        self, request: MaskRequest, tile: tuple[int, int, int], whole_tiles: bool = True, **others: Any
    ) -> BlockGrid:
        """Returns the request's grid tile after tile; with `whole_tiles` no block holds tokens of two."""
        cut = any(size % side for size, side in zip(request.thw, tile, strict=True))
        return self._grid(request, orders=("tile:{}x{}x{}".format(*tile),), whole_tiles=whole_tiles and cut, **others)


@dataclass(frozen=True)
class PredictedSource(BlockSizes):
    """Base of mask sources that predict each mask from queries and keys.

    Attributes:
        dense_text: Which rows and columns of text are dense; see `DenseText`.
        scheduled: Fields that may have a number for each denoising step; see `ByStep`.
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
        """True if a setting depends on the denoising step."""
        return any(isinstance(getattr(self, name), tuple) for name in self.scheduled)

    def _at_step(self, name: str, step: int) -> Any:
        """Returns the number at a denoising step of a field that is a `ByStep`, or None if the field is None."""
        value = getattr(self, name)
        return value[min(step, len(value) - 1)] if isinstance(value, tuple) else value

    def _require_each(self, name: str, allowed: Callable[[float], bool], message: str) -> None:
        """Raises SettingError unless all numbers of a `ByStep` are allowed, of which there is at least one."""
        value = getattr(self, name)
        values = value if isinstance(value, tuple) else (value,)
        require_value(self, name, bool(values) and all(map(allowed, values)), message)


@dataclass(frozen=True)
class OrderedSource(PredictedSource):
    """Base of predicted masks in blocks of any token order.

    Attributes:
        attention_sink: True if the first key block is active in every row.
        token_order: The token order that is cut into blocks; see `dbsp_core.masks.grid`.
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
    """Returns how many of its blocks a row keeps: `wanted` as a multiple of a number, at least one and at most all."""
    rounded = (math.ceil if round_up else math.floor)(wanted / multiple) * multiple
    return min(blocks, max(multiple, rounded))


def packed_mask(
    sequences: Sequence[tuple[BlockGrid, MaskSource]],
    request: MaskRequest,
    tokens: LocalQK | None = None,
) -> BlockMask:
    """Makes the mask of packed sequences, each by its own source for its own size.

    Args:
        sequences: The grid and the source of each. Only the grid's numbers of tokens and thw are used: block sizes and
            token orders are the source's.
        request: The attention, of which layer, heads and step are used.
        tokens: The packed queries and keys of one sample, needed by dynamic sources; these make the call collective.

    Raises:
        UserError: For no sequences, one without thw, a dynamic source without tokens, several samples, or masks that
            can't be packed.
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
        sequence_request = replace(request, thw=grid.thw, text_tokens=grid.text_tokens, text_runs=grid.text_runs)
        if source.changes != "per_call":
            masks.append(source.mask(sequence_request))
        elif tokens is None:
            raise UserError(
                "a mask source that predicts from queries and keys needs them; give packed_mask its tokens"
            )
        else:
            here = slice(first, first + grid.tokens)
            layout = SequenceLayout(
                tokens.layout.rank[here], tokens.layout.local[here], tokens.layout.world, tokens.layout.shard
            )
            masks.append(source.mask(sequence_request, replace(tokens, layout=layout)))
    return BlockMask.packed(masks)
