"""Decoding a video in tiles: which rank decodes which, and how long that is modelled to take."""

from __future__ import annotations

from collections.abc import Sequence

from dbsp_core.cost.hardware import Constants
from dbsp_core.models.decoders import VideoDecoder

__all__ = ["DECODE_RATE", "decode_bytes", "decode_s", "owners_of_tiles", "tile_areas"]

DECODE_RATE = 1 / 3
"""Rate of a decoder's convolutions over that of the transformer's matrix products. Assumed."""
MAPS = 8
"""Feature maps of the largest size, of four frames, that are held at once with the caches of frames. Assumed."""
ELEMENT_BYTES = 2


def owners_of_tiles(areas: Sequence[int], ranks: int) -> list[int]:
    """The rank that decodes each tile: the largest first, each to the rank with the least so far."""
    load, owners = [0] * ranks, [0] * len(areas)
    for tile in sorted(range(len(areas)), key=lambda tile: -areas[tile]):
        owners[tile] = load.index(min(load))
        load[owners[tile]] += areas[tile]
    return owners


def tile_areas(decoder: VideoDecoder, rows: int, columns: int) -> list[int]:
    """Latent positions of each tile, in the order of diffusers' loop: the last of a row or column may be short."""

    def lengths(size: int, tile: int, stride: int) -> list[int]:
        return [min(tile, size - first) for first in range(0, size, stride)]

    down, across = (lengths(*of) for of in zip((rows, columns), decoder.tile, decoder.stride, strict=True))
    return [high * wide for high in down for wide in across]


def decode_s(
    decoder: VideoDecoder, latents: tuple[int, int, int], known: Constants, ranks: int, *, shared: bool, one_node: bool
) -> float:
    """Seconds to decode latents of (frames, rows, columns), modelled.

    Args:
        ranks: How many have the latents.
        shared: Whether they share out its tiles and gather them; else each decodes all, untiled.
        one_node: Whether tiles travel within a node.
    """
    frames, rows, columns = latents
    position_s = frames * decoder.flops / (DECODE_RATE * known.linear_flops_per_s)
    if not shared:
        return rows * columns * position_s
    areas, load = tile_areas(decoder, rows, columns), [0] * ranks
    for area, owner in zip(areas, owners_of_tiles(areas, ranks), strict=True):
        load[owner] += area
    rate = known.exchange_bytes_per_s
    if not one_node and known.network_bytes_per_s is not None:
        rate = min(rate, known.network_bytes_per_s)
    received = max(load) * (ranks - 1) * frames * 4 * 3 * decoder.pixels**2 * ELEMENT_BYTES
    return max(load) * position_s + received / rate


def decode_bytes(decoder: VideoDecoder, latents: tuple[int, int, int], *, shared: bool) -> float:
    """Bytes that a rank holds while it decodes: the largest feature maps at once, and the video. Modelled."""
    frames, rows, columns = latents
    areas = tile_areas(decoder, rows, columns)
    at_once = max(areas) if shared else rows * columns
    maps = at_once * decoder.map_pixels**2 * 4 * decoder.width * MAPS
    positions = 3 * sum(areas) if shared else rows * columns  # as gathered, as blended, and the video
    return float(ELEMENT_BYTES * (maps + positions * frames * 4 * 3 * decoder.pixels**2))
