"""The fixed point in which the tokens of blocks are summed: what every implementation of `sum_tokens` rounds to."""

from __future__ import annotations

__all__ = ["DIRECTION_UNIT", "LIMIT", "MEAN_UNIT"]

LIMIT = 2.0**15  # magnitudes beyond it count as it: no attention has such queries or keys
MEAN_UNIT = 2.0**-32  # with LIMIT, int64 holds the sum of 2**16 tokens
DIRECTION_UNIT = 2.0**-20
