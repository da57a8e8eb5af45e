"""What decoding a video costs, by autoencoder: diffusers' tiles, and work that was counted."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["COGVIDEOX", "WAN", "WAN_2_2", "VideoDecoder"]


@dataclass(frozen=True)
class VideoDecoder:
    """The decoder of a video autoencoder, as published, with diffusers' usual tiles.

    Attributes:
        flops: FLOP for each position of a latent frame, counted on the class in diffusers, biases and norms left out.
        parameters: Number of the autoencoder's.
        pixels: Height and width in pixels of a latent position.
        tile: Most rows and columns of a tile, in latents; `stride` is from one tile to the next.
        width: Channels of its largest feature maps, which have `map_pixels` by that many for each latent position.
    """

    flops: float
    parameters: int
    pixels: int
    tile: tuple[int, int]
    stride: tuple[int, int]
    width: int
    map_pixels: int = 8


WAN = VideoDecoder(2.162e9, 126_892_531, 8, (32, 32), (24, 24), 96)
WAN_2_2 = VideoDecoder(1.884e10, 704_688_668, 16, (16, 16), (12, 12), 256)
COGVIDEOX = VideoDecoder(4.746e9, 215_583_907, 8, (30, 45), (25, 36), 128)
