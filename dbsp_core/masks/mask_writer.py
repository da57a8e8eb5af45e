"""Writes mask files."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from safetensors.numpy import save

from dbsp_core.masks.block_mask import BlockMask
from dbsp_core.masks.grid import CANONICAL, BlockGrid
from dbsp_core.masks.mask_file import SIZES, Orders, mask_values
from dbsp_core.masks.steps import StepGroups
from dbsp_core.utils.errors import UserError
from dbsp_core.utils.files import user_path, write_atomically


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
