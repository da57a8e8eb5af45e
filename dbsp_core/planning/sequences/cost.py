"""Cost of a sequence: seconds that grow with its tokens, and seconds that grow with its dense blocks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dbsp_core.utils.errors import require_value

__all__ = ["PICO", "SequenceCost"]

PICO = 10**12
"""Costs are whole picoseconds: their sums are the same bits in any order and on any machine."""


@dataclass(frozen=True)
class SequenceCost:
    """Seconds of one layer's forward pass: `token_s` · tokens + `block_s` · dense blocks of all heads.

    KnapFormer's Eq. 2, (24·n·d² + γ·4·n²·d) / F, is the same with one block a token pair: see `gamma_corrected`.

    Attributes:
        token_s: Seconds a token, of everything but attention's scores and values.
        block_s: Seconds a dense block of one head.

    Raises:
        UserError: For seconds that are not positive (`block_s` may be 0).
    """

    token_s: float
    block_s: float

    def __post_init__(self) -> None:
        require_value(self, "token_s", 0 < self.token_s < 1, "must lie between 0 and 1 s", "cost of a sequence: ")
        require_value(self, "block_s", 0 <= self.block_s < 1, "must lie between 0 and 1 s", "cost of a sequence: ")

    @classmethod
    def gamma_corrected(cls, width: int, gamma: float, flops_per_s: float = 1e15, heads: int = 1) -> SequenceCost:
        """KnapFormer's Eq. 2 for a model of width d and blocks of 1 × 1 tokens; `heads` share a pair's 4·d FLOP."""
        return cls(24 * width**2 / flops_per_s, gamma * 4 * width / flops_per_s / heads)

    def picoseconds(self, tokens: np.ndarray, blocks: np.ndarray) -> np.ndarray:
        """int64[n] of int64[n] tokens and int64[n] dense blocks: each term rounded to whole picoseconds."""
        linear, attention = np.rint(tokens * (self.token_s * PICO)), np.rint(blocks * (self.block_s * PICO))
        return linear.astype(np.int64) + attention.astype(np.int64)
