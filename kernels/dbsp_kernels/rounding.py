"""Constants and sizes of rounding: torch's and Triton's implementations share them and are bitwise identical."""

from __future__ import annotations

# The fixed point of sums of tokens.
LIMIT = 2.0**15  # magnitudes beyond it count as it: no attention has such queries or keys
MEAN_UNIT = 2.0**-32  # with LIMIT, int64 holds the sum of 2**16 tokens
DIRECTION_UNIT = 2.0**-20

BITS = 21
"""Magnitudes of a row's elements are rounded to so many bits: products of 2048 of them add up exactly in float64."""
SCALE_EXPONENT = BITS + 126 + 127
"""The biased exponent of a row's scale in float32, with that of its largest element: of 2^BITS over 2^(e − 126)."""
LEAST_EXPONENT = SCALE_EXPONENT - 254
"""Smaller elements count as if the largest one had this exponent, of which the scale is still a float32."""
UNIT_EXPONENT = 1023 - 126 - BITS
"""The biased exponent of the scale's inverse in float64, less that of the row's largest element in float32."""

LARGEST = 127.0
TINY = 2.0**-100
"""A token whose largest magnitude is below it is all zeros: its scale could be subnormal, which GPUs may flush."""


def stages_of(head_dim: int) -> int:
    """Returns log2 of the channels that are rotated together: the largest power of two that divides D."""
    return (head_dim & -head_dim).bit_length() - 1


def norm_of(head_dim: int) -> float:
    """Returns what makes `dbsp_kernels.exchange.butterflies` a rotation."""
    return float(2.0 ** (-stages_of(head_dim) / 2))
