"""Reads and writes mask files."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from dbsp_core.masks.block_mask import BlockMask
from dbsp_core.masks.grid import CANONICAL, BlockGrid, Order
from dbsp_core.masks.steps import StepGroups
from dbsp_core.utils.errors import UserError, in_short
from dbsp_core.utils.files import require_file, user_path, write_atomically


def block_counts(grid: BlockGrid) -> tuple[int, int]:
    """Returns (nq, nk) without building the grid's arrays, since a file's sizes may be absurd."""
    segments = grid.text_tokens, grid.tokens - grid.text_tokens
    nq, nk = (sum(-(-segment // block) for segment in segments) for block in (grid.block_q, grid.block_k))
    return nq, nk


def mask_values(bits: torch.Tensor, packed: bool) -> np.ndarray:
    """Converts bool[H, nq, nk] to a file's uint8[H, nq, nk], or uint8[H, nq, ⌈nk / 8⌉] if `packed`.

    Packed bytes hold eight blocks of a row, the first in the most significant bit.
    """
    values = bits.cpu().numpy()
    return np.packbits(values, axis=-1) if packed else values.astype(np.uint8)


def mask_bits(values: np.ndarray, nk: int, packed: bool) -> torch.Tensor:
    """Inverts `mask_values`, ignoring bits beyond a row's last block."""
    return torch.from_numpy(np.unpackbits(values, axis=-1, count=nk) if packed else values).bool()


Orders = tuple[Order, ...]

_CONVERT = "make it from another project's masks or a recording: dbsp masks convert IN OUT.safetensors"
SIZES = ("tokens", "text_tokens", "block_q", "block_k")


class MaskFile:
    """A safetensors file of masks, read one layer at a time; see docs/mask-files.md.

    Its tensor is `mask`, uint8 0/1 of shape [H, nq, nk] (one mask for all layers), [L, H, nq, nk] or, with step
    groups, [S, L, H, nq, nk]; or `packed`, the same with eight blocks per byte.

    Attributes:
        grid: Grid of all masks, apart from token orders.
        groups: The step groups; None: masks hold for all steps.
        packed: True if a byte has eight blocks.
        heads: Number of heads.
        layers: Number of layers; 1 if all layers share a mask.
        per_layer: False if all layers share a mask.

    Raises:
        UserError: The file is not a valid mask file.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = user_path(path)
        require_file(self.path, "mask file", f"give the path of one, or {_CONVERT}")
        try:
            with safe_open(self.path, framework="numpy") as file:
                names, metadata = list(file.keys()), file.metadata() or {}
                views = {name: file.get_slice(name) for name in ("mask", "packed", "orders") if name in names}
                kinds = {name: (view.get_dtype(), tuple(view.get_shape())) for name, view in views.items()}
                if kinds.get("orders", ("U8",))[0] != "U8":  # dtypes that numpy lacks
                    raise self._error(f"tensor 'orders' is {kinds['orders'][0]} and must be uint8 (U8)")
                order_index = file.get_tensor("orders") if "orders" in names else np.zeros(1, dtype=np.uint8)
        except (SafetensorError, OSError, TypeError) as error:
            raise UserError(
                f"mask file {self.path} is not a readable safetensors file ({error}); write it again with "
                f"dbsp_core.save_mask, or {_CONVERT}"
            ) from error
        self.packed = "packed" in names
        if self.packed == ("mask" in names):
            raise UserError(
                f"mask file {self.path} needs one tensor, 'mask' or 'packed', got {names}; name it so, or make a mask "
                "file with `dbsp masks convert`"
            )
        self._tensor = "packed" if self.packed else "mask"
        self.grid, self.groups = self._parse(metadata)
        shape = self._checked_shape(*kinds[self._tensor])
        self._leading, self.heads = shape[:-3], shape[-3]  # groups and layers
        self.per_layer, self.layers = bool(self._leading), (self._leading or (1,))[-1]
        self._orders = self._order_table(metadata.get("orders", CANONICAL).split(","), order_index)

    def _error(self, message: str) -> UserError:
        return UserError(f"mask file {self.path}: {message}")

    def _parse(self, metadata: dict[str, str]) -> tuple[BlockGrid, StepGroups | None]:
        missing = [key for key in SIZES if key not in metadata]
        if missing:
            raise UserError(
                f"mask file {self.path} lacks metadata {', '.join(missing)}; save it with block_q, block_k, tokens "
                "and text_tokens as strings"
            )
        try:
            tokens, text_tokens, block_q, block_k = (_whole_number(key, metadata[key]) for key in SIZES)
            sizes = metadata["thw"].split(",") if "thw" in metadata else None
            thw = None if sizes is None else tuple(_whole_number("thw", size) for size in sizes)
            if thw is not None and (len(thw) != 3 or min(thw) < 1):
                shown = in_short(metadata["thw"])
                raise UserError(f"thw={shown} must be three numbers of at least 1: frames, rows, columns")
            groups = StepGroups.parse(metadata["groups"]) if "groups" in metadata else None
            if metadata.get("pooled_keys", "false") != "false":
                raise UserError("pooled_keys of skipped blocks are not computed; record or convert the masks again")
            return BlockGrid(tokens, text_tokens, block_q, block_k, thw), groups
        except UserError as error:
            raise self._error(f"bad metadata: {error}") from error.__cause__

    def _checked_shape(self, dtype: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Checks that the shape fits the metadata (groups, layers, heads, blocks), and returns it."""
        usual = (5,) if self.groups else (3, 4)
        if dtype != "U8" or len(shape) not in usual or 0 in shape:
            leading = "[groups, layers, " if self.groups else "[layers, "
            raise self._error(
                f"tensor {self._tensor!r} is {dtype} of shape {list(shape)}, expected uint8 (U8) of shape "
                f"{leading}heads, nq, nk], none of them 0; five dimensions need metadata groups, such as '0-9,10-49'"
            )
        nq, nk = block_counts(self.grid)
        if shape[-2:] != (nq, -(-nk // 8) if self.packed else nk):
            raise self._error(
                f"shape {list(shape)} does not fit its metadata, which makes {nq}×{nk} blocks; correct block_q, "
                "block_k, tokens or text_tokens"
            )
        if self.groups is not None and shape[0] != len(self.groups):
            raise self._error(f"{shape[0]} step groups of masks, but metadata groups has {len(self.groups)}")
        return shape

    def _order_table(self, names: list[str], table: np.ndarray) -> np.ndarray:
        """Checks and returns the token order of each head, str[groups, layers, heads]."""
        shape = (*self._leading, self.heads)
        fits = table.shape in {shape[start:] for start in range(len(shape))} or table.shape == (1,) == (len(names),)
        if not fits or table.dtype != np.uint8 or len(names) > 256 or table.max() >= len(names):  # uint8 indices
            raise self._error(
                f"bad token orders: tensor 'orders' must be uint8 of shape {list(shape)} (or the last dimensions of "
                f"it) and count metadata orders, which has {in_short(names)}"
            )
        try:
            self.grid.with_orders(names)
        except UserError as error:
            raise self._error(f"bad token orders: {error}") from error.__cause__
        return np.array(names)[np.broadcast_to(table, shape)]

    def orders(self, layer: int, group: int = 0) -> Orders:
        """Returns the token order of each head, or one order if all heads share it."""
        return one_or_each(self._orders[self._position(layer, group)].tolist())

    def _position(self, layer: int, group: int) -> tuple[int, ...]:
        return (group, layer)[-len(self._leading) :] if self._leading else ()

    def layer(self, index: int, group: int = 0) -> BlockMask:
        """Returns the mask of a layer in a step group; `index` is ignored if all layers share a mask.

        Raises UserError for a missing layer or group, or values other than 0 and 1.
        """
        if self.per_layer and not 0 <= index < self.layers:
            raise UserError(f"mask file {self.path} has {self.layers} layers, got index {index}")
        if not 0 <= group < len(self.groups or (0,)):
            raise UserError(f"mask file {self.path} has {len(self.groups or (0,))} step groups, got no. {group + 1}")
        position = self._position(index, group)
        try:
            with safe_open(self.path, framework="numpy") as file:
                view = file.get_slice(self._tensor)
                values = view[position] if position else view[:]
        except (SafetensorError, OSError) as error:
            raise UserError(f"mask file {self.path} can no longer be read ({error})") from error
        if not self.packed and int(values.max()) > 1:
            raise self._error(f"values must be 0 or 1, got {int(values.max())}")
        bits = mask_bits(values, block_counts(self.grid)[1], self.packed)
        return BlockMask(bits, self.grid.with_orders(self.orders(index, group)))


def one_or_each(orders: Sequence[Order]) -> Orders:
    """Returns one order if all heads share it, otherwise one per head."""
    return (orders[0],) if len(set(orders)) == 1 else tuple(orders)


def _whole_number(key: str, text: str) -> int:
    if not re.fullmatch(r"\s*[+-]?\d{1,18}\s*", text, re.ASCII):
        raise UserError(f"{key} must be a whole number of at most 18 digits, got {in_short(text)}")
    return int(text)


@dataclass(frozen=True)
class MaskLayout:
    """Describes the masks in a file. Raises UserError for packed sequences, and for orders that do not fit."""

    grid: BlockGrid  # of every mask, apart from token orders
    heads: int
    layers: int | None = None  # None: one mask for every layer
    groups: StepGroups | None = None
    orders: tuple[Orders, ...] = ((CANONICAL,),)  # per mask, by group and layer; one element: for all masks

    def __post_init__(self) -> None:
        if self.grid.packed_from:
            raise UserError("a mask file holds one sequence, got a packed mask; save each of `mask.parts`")
        for orders in set(self.orders):
            self.grid.with_orders(orders)

    @property
    def leading(self) -> tuple[int, ...]:
        groups = (len(self.groups),) if self.groups else ()
        layers = (self.layers or 1,) if self.layers is not None or self.groups else ()
        return groups + layers

    def metadata(self) -> tuple[dict[str, str], dict[str, np.ndarray]]:
        """Returns the file's metadata, and its tensor `orders` if heads or layers differ."""
        texts = {key: str(getattr(self.grid, key)) for key in SIZES}
        if self.grid.thw is not None:
            texts["thw"] = ",".join(map(str, self.grid.thw))
        if self.groups is not None:
            texts["groups"] = str(self.groups)
        names = list(dict.fromkeys(str(order) for orders in self.orders for order in orders))
        if names != [CANONICAL]:
            texts["orders"] = ",".join(names)
        if len(names) == 1:
            return texts, {}
        of_heads = [orders if len(orders) > 1 else orders * self.heads for orders in self.orders]
        table = np.array([[names.index(str(order)) for order in orders] for orders in of_heads], dtype=np.uint8)
        return texts, {"orders": table.reshape(*(self.leading if len(table) > 1 else ()), self.heads)}


def mask_file_bytes(layout: MaskLayout, masks: Iterable[torch.Tensor], packed: bool = True) -> bytes:
    """Returns the content of a mask file.

    Args:
        masks: Each mask's bits, bool[H, nq, nk], by group and layer.
        packed: True to store eight blocks per byte.
    """
    values = np.stack([mask_values(bits, packed) for bits in masks])
    metadata, orders = layout.metadata()
    values = values.reshape(*layout.leading, *values.shape[1:])
    return save({"packed" if packed else "mask": values, **orders}, metadata)


def save_mask(
    path: str | os.PathLike[str],
    masks: BlockMask | Sequence[BlockMask] | Sequence[Sequence[BlockMask]],
    *,
    groups: StepGroups | str | None = None,
    packed: bool = False,
) -> None:
    """Writes a mask file atomically.

    Args:
        path: The file, usually `NAME.safetensors`.
        masks: One mask for all layers, a list with one mask per layer, or with `groups` a list of such lists.
        groups: Step groups, such as "5-9,10-24,25-49"; steps before the first are dense.
        packed: True to store eight blocks per byte.

    Raises:
        UserError: The masks do not fit together.
    """
    groups = StepGroups.parse(groups) if isinstance(groups, str) else groups
    items: list[BlockMask | Sequence[BlockMask]] = [masks] if isinstance(masks, BlockMask) else list(masks)
    by_group = [[mask] if isinstance(mask, BlockMask) else list(mask) for mask in items]
    flat = [mask for layers in by_group for mask in layers]
    if not flat:
        raise UserError("save_mask needs at least one mask")
    if groups is not None and (len(by_group) != len(groups) or len({len(layers) for layers in by_group}) > 1):
        raise UserError(f"groups {groups} need {len(groups)} lists of masks, all with the same number of layers")
    if groups is None and any(not isinstance(mask, BlockMask) for mask in items):
        raise UserError("lists of lists of masks need groups, such as groups='0-9,10-49'")
    grid, heads = flat[0].grid.with_orders((CANONICAL,)), flat[0].heads
    if any(mask.grid.with_orders((CANONICAL,)) != grid or mask.heads != heads for mask in flat):
        raise UserError("all layers of a mask file need the same grid and number of heads")
    layers = None if isinstance(masks, BlockMask) else len(by_group[0]) if groups else len(flat)
    besides = next((mask.branch.name for mask in flat if mask.branch is not None), None)
    if besides is None and any(mask.absent is not None for mask in flat):
        besides = "mask's absent keys"
    if besides is not None:
        raise UserError(f"a mask file cannot store a {besides}; save BlockMask(mask.bits, mask.grid) instead")
    layout = MaskLayout(grid, heads, layers, groups, tuple(mask.grid.orders for mask in flat))
    write_atomically(user_path(path), mask_file_bytes(layout, (mask.bits for mask in flat), packed))
