"""Patterns of attention heads of video models, as PAROAttention and SpargeAttn show them. Only numpy.

A pattern gives each (query block, key block) pair a value from 0 (background) to 1 (likely to be dense).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from dbsp_core.masks.grid import BlockAxis, BlockGrid

__all__ = ["PATTERNS", "BlockPositions", "always_dense", "profile_basis"]

KNOTS = 9
"""Knots of the slow wave of a profile over the whole video."""


@dataclass(frozen=True, eq=False)
class BlockPositions:
    """The positions of one axis's blocks in a video of `tokens` tokens, `frame` of them in each frame.

    `middle`, float64[n], is the video token at each block's middle, and 0 for text; `is_text` is bool[n].
    """

    middle: np.ndarray
    is_text: np.ndarray
    frame: int
    tokens: int

    @classmethod
    def of(cls, axis: BlockAxis, text_tokens: int, thw: tuple[int, int, int]) -> BlockPositions:
        frames, height, width = thw
        middle = axis.starts + (axis.lengths - 1) / 2 - text_tokens
        return cls(np.maximum(middle, 0), axis.starts < text_tokens, height * width, frames * height * width)

    @property
    def frame_number(self) -> np.ndarray:
        """int64[n]"""
        return (self.middle // self.frame).astype(np.int64)


def _frames(q: BlockPositions, k: BlockPositions, rng: np.random.Generator) -> np.ndarray:
    """Blocks on the diagonal: each frame attends to itself, and less to its neighbours."""
    apart = np.abs(q.frame_number[:, None] - k.frame_number[None, :])
    return np.clip(1 - apart / 3, 0, 1)


def _stripes(q: BlockPositions, k: BlockPositions, rng: np.random.Generator) -> np.ndarray:
    """Multi-diagonals at frame stride: the same place in every frame."""
    apart = q.middle[:, None] - k.middle[None, :]
    apart = np.abs((apart + q.frame / 2) % q.frame - q.frame / 2)
    return np.clip(1.5 - apart / (0.08 * q.frame), 0, 1)


def _sinks(q: BlockPositions, k: BlockPositions, rng: np.random.Generator) -> np.ndarray:
    """Sink columns: every query attends to the first frame and to a few key blocks anywhere."""
    drawn = (k.frame_number == 0) | (rng.random(len(k.middle)) < 0.04)
    return np.broadcast_to(drawn, (len(q.middle), len(k.middle))).astype(np.float64)


def _scattered(q: BlockPositions, k: BlockPositions, rng: np.random.Generator) -> np.ndarray:
    """No shape: only profiles and chance."""
    return np.zeros((len(q.middle), len(k.middle)))


PATTERNS: tuple[Callable[[BlockPositions, BlockPositions, np.random.Generator], np.ndarray], ...] = (
    _frames,
    _stripes,
    _sinks,
    _scattered,
)
"""Functions of query and key positions and a generator that return float64[nq, nk]."""


def always_dense(grid: BlockGrid) -> np.ndarray:
    """bool[nq, nk]: the diagonal, and all rows and columns of text."""
    q, k = grid.q_axis, grid.k_axis
    dense = np.zeros((len(q), len(k)), dtype=bool)
    dense[np.arange(len(q)), k.block_of[q.starts + q.lengths // 2]] = True
    grid.make_text_dense(dense)
    return dense


def profile_basis(places: BlockPositions) -> np.ndarray:
    """float64[B, n]: a profile is a weighted sum of these rows with standard normal weights.

    It has a slow wave over the video, as scenes have, and a wave over the frame, the same in every frame.
    """
    slow = _hats(places.middle / places.tokens, KNOTS)
    within = _hats(places.middle % places.frame / places.frame, 4)
    return np.concatenate([slow, 0.3 * within])


def _hats(at: np.ndarray, knots: int) -> np.ndarray:
    """float64[knots, n]: weights of linear interpolation between `knots` knots on [0, 1], at `at`."""
    return np.clip(1 - np.abs(at * (knots - 1) - np.arange(knots)[:, None]), 0, 1)
