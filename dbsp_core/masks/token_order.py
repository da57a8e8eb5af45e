"""Token orders: the order in which a mask reads video tokens."""

from __future__ import annotations

import functools
import itertools
import re

import numpy as np

from dbsp_core.utils.errors import UserError

__all__ = ["AXIS_ORDERS", "CANONICAL", "require_order", "tile_lengths", "video_order"]

CANONICAL = "thw"
AXIS_ORDERS = tuple("".join(axes) for axes in itertools.permutations(CANONICAL))
"""The six orders of frames, rows and columns, slowest first (PAROAttention, §3.2): in "hwt" time runs fastest."""

_TILES = re.compile(r"tile:([1-9]\d{0,8})x([1-9]\d{0,8})x([1-9]\d{0,8})")


def require_order(order: str) -> None:
    """Raises UserError for anything but one of AXIS_ORDERS or "tile:TxHxW"."""
    if order not in AXIS_ORDERS and not _TILES.fullmatch(order):
        raise UserError(
            f"unknown token order {order!r}; use one of {', '.join(AXIS_ORDERS)}, or tiles such as 'tile:4x4x4' "
            "(frames × rows × columns)"
        )


@functools.lru_cache(maxsize=16)
def video_order(order: str, thw: tuple[int, int, int]) -> np.ndarray:
    """Read-only int64[t·h·w]: the (t, h, w) position of each video token in `order`.

    Order "tile:TxHxW" (Sliding Tile Attention) is tile after tile in (t, h, w) order, and so within each tile; tiles
    at the far sides are smaller. Raises UserError for an unknown order.
    """
    require_order(order)
    tiles = _TILES.fullmatch(order)
    if tiles is None:
        positions = np.arange(np.prod(thw)).reshape(thw)
        token_permutation = positions.transpose([CANONICAL.index(axis) for axis in order]).reshape(-1)
    else:
        place = np.indices(thw).reshape(3, -1)
        tile, within = np.divmod(place, np.array([int(size) for size in tiles.groups()])[:, None])
        token_permutation = np.lexsort((*within[::-1], *tile[::-1]))
    token_permutation.flags.writeable = False
    return token_permutation


def tile_lengths(order: str, thw: tuple[int, int, int]) -> np.ndarray:
    """int64[tiles]: tokens of each tile of a video in order "tile:TxHxW"; raises UserError for other orders."""
    tiles = _TILES.fullmatch(order)
    if tiles is None:
        raise UserError(f"blocks of whole tiles need an order such as 'tile:4x4x4', got {order!r}")
    sides = [np.diff(np.append(np.arange(0, n, int(size)), n)) for n, size in zip(thw, tiles.groups(), strict=True)]
    lengths: np.ndarray = (sides[0][:, None, None] * sides[1][:, None] * sides[2]).ravel()
    return lengths
