"""Rounding constants shared by the torch and Triton implementations, which are bitwise identical."""

from __future__ import annotations

# Fixed-point sums of tokens
LIMIT = 2.0**15  # larger magnitudes are clamped; queries and keys never reach it in practice
MEAN_UNIT = 2.0**-32  # int64 holds the sum of 2**16 tokens at LIMIT
DIRECTION_UNIT = 2.0**-20

BITS = 21  # bits of a rounded element: the sum of 2048 products is exact in float64
SCALE_EXPONENT = BITS + 126 + 127
"""Biased float32 exponent of a row's scale plus that of its largest element: of 2^BITS over 2^(e − 126)."""
LEAST_EXPONENT = SCALE_EXPONENT - 254
"""Smallest exponent assumed for the largest element, so that the scale is still a finite float32."""
UNIT_EXPONENT = 1023 - 126 - BITS
"""Biased float64 exponent of the inverse scale minus the float32 exponent of the row's largest element."""

LARGEST = 127.0
TINY = 2.0**-100  # tokens with all magnitudes below are set to zero: GPUs may flush their subnormal scales


def stages_of(head_dim: int) -> int:
    """Returns log2 of the number of channels rotated together, the largest power of two that divides D."""
    return (head_dim & -head_dim).bit_length() - 1


def norm_of(head_dim: int) -> float:
    """Returns the factor that makes `dbsp_kernels.exchange.butterflies` a rotation."""
    return float(2.0 ** (-stages_of(head_dim) / 2))
