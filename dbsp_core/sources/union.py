"""Unions of mask sources, and NABLA as such a union."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar

from dbsp_core.comm.consistency import run_consistently
from dbsp_core.masks.block_mask import BlockMask
from dbsp_core.masks.grid import BlockGrid
from dbsp_core.sources.base import BlockSizes, Changes, LocalQK, MaskRequest, MaskSource
from dbsp_core.sources.sparge import SpargeSource
from dbsp_core.sources.window import Sizes, WindowSource
from dbsp_core.utils.errors import SettingError, UserError, in_short
from dbsp_kernels.segments import to_device

_FASTER: tuple[Changes, ...] = ("never", "per_step", "per_call")
_MOST_KEPT = 8  # cached masks of static parts, while other parts are predicted


def _read_parts(value: Any, name: str) -> tuple[MaskSource, ...]:
    """Checks a list of sources, already read by `dbsp_core.sources.spec.read_mask`."""
    if not isinstance(value, (list, tuple)):
        raise UserError(f"{name} must be a list of masks such as [{{source: window}}, …], got {in_short(value)}")
    return tuple(value)


@dataclass(frozen=True)
class UnionSource:
    """Keeps the blocks that any of several sources keeps; changes as often as its most frequently changing source.

    Attributes:
        of: The sources, which must share block sizes and token order.
    """

    of: tuple[MaskSource, ...] = field(default=(), metadata={"read": _read_parts})

    def __post_init__(self) -> None:
        object.__setattr__(self, "of", tuple(part for source in self.of for part in parts_of(source)))
        if len(self.of) < 2:
            raise SettingError(
                "mask source 'union' needs two masks or more; for example of: [{source: window, window: [3, 9, 9]}, "
                "{source: sparge}]",
                ("of",),
            )

    @property
    def changes(self) -> Changes:
        return max((part.changes for part in self.of), key=_FASTER.index)

    def cache_key(self, request: MaskRequest) -> Hashable:
        return tuple(part.cache_key(request) for part in self.of)

    def grid(self, request: MaskRequest) -> BlockGrid:
        """Raises UserError if the parts' blocks differ."""
        return self._common([part.grid(request) for part in self.of])

    def mask(self, request: MaskRequest, tokens: LocalQK | None = None) -> BlockMask:
        """Returns the union. Collective if a part is predicted, which needs `tokens`."""
        if tokens is None:
            return self._joined([part.mask(request) for part in self.of])
        masks = []
        for number, part in enumerate(self.of):
            predicted = part.changes == "per_call"
            masks.append(part.mask(request, tokens) if predicted else self._kept(number, request, tokens))
        return self._joined(masks)

    @cached_property
    def _made(self) -> OrderedDict[Hashable, BlockMask]:
        return OrderedDict()

    def _kept(self, number: int, request: MaskRequest, tokens: LocalQK) -> BlockMask:
        """Returns the mask of a static part. Collective at the first call, so that all ranks raise together."""
        part, device, control = self.of[number], tokens.q.device, tokens.group.control()
        video = request.thw, request.text_tokens, request.heads, request.layers
        key = number, video, part.cache_key(request), tokens.group, device
        if key not in self._made:
            subject = f"the mask of layer {request.layer}"
            mask = run_consistently(control, lambda: part.mask(request), lambda mask: mask.fingerprint, subject)
            self._made[key] = replace(mask, bits=to_device(mask.bits, device))
            if len(self._made) > _MOST_KEPT:
                self._made.popitem(last=False)
        return self._made[key]

    def _joined(self, masks: Sequence[BlockMask]) -> BlockMask:
        """Joins masks, repeating masks per batch item where needed."""
        grid = self._common([mask.grid for mask in masks])
        heads = max(mask.heads for mask in masks)
        if any(heads % mask.heads for mask in masks):
            counts = " and ".join(str(mask.heads) for mask in masks)
            raise UserError(f"the masks of a union have {counts} heads; give masks of one model")
        if len(grid.orders) > 1:
            grid = replace(grid, orders=grid.orders * (heads // len(grid.orders)))
        bits = masks[0].bits.repeat(heads // masks[0].heads, 1, 1)
        for mask in masks[1:]:
            bits |= mask.bits.to(bits.device).repeat(heads // mask.heads, 1, 1)
        if any(mask.absent is not None for mask in masks):
            raise UserError("masks with absent keys cannot be joined; set padding: none of mask source 'ssta'")
        branches = [mask.branch for mask in masks if mask.branch is not None]
        if len(branches) > 1:
            raise UserError(
                f"several masks of a union have a {branches[0].name}; give all but one of them {branches[0].without}"
            )
        return BlockMask(bits, grid, next(iter(branches), None))

    def _common(self, grids: Sequence[BlockGrid]) -> BlockGrid:
        """Returns the common grid, with thw even if a part (from a file) lacks it."""
        first = next((grid for grid in grids if grid.thw is not None), grids[0])
        blocks: dict[Hashable, str] = {}
        for grid in (first, *grids):
            order = grid.common_order
            sizes = grid.tokens, grid.text_tokens, grid.block_q, grid.block_k
            starts = tuple(axis.starts.tobytes() for axis in (grid.q_axis, grid.k_axis))  # whole tiles may be short
            orders = "/".join(map(str, dict.fromkeys(grid.orders)))
            short = ", with smaller tiles at the far sides" if grid.whole_tiles else ""
            words = f"{grid.tokens} tokens in {grid.block_q}×{grid.block_k} blocks in order {orders}{short}"
            blocks.setdefault((*sizes, grid.orders if order is None else (order,), starts), words)
        if len(blocks) > 1:
            raise UserError(
                f"the masks of a union must have the same blocks, got {' and '.join(blocks.values())}; give all of "
                "them one block_q, block_k and token order (token_order, tile), and vsa with other masks only a video "
                "that its tile divides"
            )
        return first


def parts_of(source: MaskSource) -> tuple[MaskSource, ...]:
    """Returns the sources of a union, or the source itself."""
    return source.of if isinstance(source, UnionSource) else (source,)


TILE = (1, 8, 8)
USUAL_CDF = 0.9
USUAL_WINDOW = (11, 3, 3)  # of Kandinsky 5's checkpoints for ten seconds


@dataclass(frozen=True)
class NablaSource(BlockSizes):
    """NABLA (Mikhailov et al., 2025, arXiv:2507.13546, Alg. 1): a union of two sources in order "tile:1x8x8".

    A block of 64 queries (8 × 8 positions of a frame) keeps the fewest blocks with pooled attention above `cdf`, like
    `SpargeSource` with crossing and without similarity, and the tiles around its own, like `WindowSource` without
    shifting.

    Attributes:
        cdf: P. None: the checkpoint's value if it has NABLA, else 0.9.
        window: Frames, and rows and columns of tiles (wT, wH, wW). None: the checkpoint's, or [11, 3, 3].
    """

    cdf: float | None = None
    window: Sizes | None = None
    changes: ClassVar[Changes] = "per_call"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._union  # noqa: B018  raises for values out of range

    def or_else(self, checkpoint: NablaSource) -> NablaSource:
        """Returns this source with unset settings from a checkpoint's source."""
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
        return UnionSource((near, SpargeSource(*sizes, cdf=cdf, similarity=-1.0, token_order=order, crossing=True)))
