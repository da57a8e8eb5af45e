"""Patterns of attention heads of video models, after figures of PAROAttention and SpargeAttn. Numpy only."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from dbsp_core.masks.grid import BlockAxis, BlockGrid

KNOTS = 9  # knots of the slow wave of a profile over the whole video


@dataclass(frozen=True, eq=False)
class BlockPositions:
    """Positions of one axis's blocks in a video."""

    middle: np.ndarray  # float64[n], video token at each block's middle; 0 for text
    is_text: np.ndarray  # bool[n]
    frame: int  # tokens of a frame
    tokens: int  # tokens of the video

    @classmethod
    def from_axis(cls, axis: BlockAxis, text_tokens: int, thw: tuple[int, int, int]) -> BlockPositions:
        frames, height, width = thw
        middle = axis.starts + (axis.lengths - 1) / 2 - text_tokens
        return cls(np.maximum(middle, 0), axis.starts < text_tokens, height * width, frames * height * width)


def pattern_shapes(q: BlockPositions, k: BlockPositions, rng: np.random.Generator) -> list[np.ndarray]:
    """Returns the patterns, float64[nq, nk] from 0 to 1 each."""
    apart = q.middle[:, None] - k.middle[None, :]
    q_frame, k_frame = (positions.middle // positions.frame for positions in (q, k))
    # 1. Frames: each attends to itself, and less to neighbors
    frames = np.clip(1 - np.abs(q_frame[:, None] - k_frame[None, :]) / 3, 0, 1)
    # 2. Stripes at frame stride: the same position in every frame
    within = np.abs((apart + q.frame / 2) % q.frame - q.frame / 2)
    stripes = np.clip(1.5 - within / (0.08 * q.frame), 0, 1)
    # 3. Sinks: every query attends to the first frame and to a few key blocks anywhere
    drawn = (k_frame == 0) | (rng.random(len(k.middle)) < 0.04)
    sinks = np.broadcast_to(drawn, apart.shape).astype(np.float64)
    # 4. No pattern, only profiles and noise
    return [frames, stripes, sinks, np.zeros(apart.shape)]


def always_dense(grid: BlockGrid) -> np.ndarray:
    """Returns bool[nq, nk]: the diagonal, and all rows and columns of text."""
    q, k = grid.q_axis, grid.k_axis
    dense = np.zeros((len(q), len(k)), dtype=bool)
    dense[np.arange(len(q)), k.block_of[q.starts + q.lengths // 2]] = True
    grid.make_text_dense(dense)
    return dense


def profile_basis(positions: BlockPositions) -> np.ndarray:
    """Returns basis functions float64[B, n]; a profile is their sum with standard normal weights.

    They are a slow wave over the video, like scenes, and a wave over the frame, equal in all frames.
    """
    slow = _hats(positions.middle / positions.tokens, KNOTS)
    within = _hats(positions.middle % positions.frame / positions.frame, 4)
    return np.concatenate([slow, 0.3 * within])


def _hats(at: np.ndarray, knots: int) -> np.ndarray:
    """Returns weights of linear interpolation between `knots` knots on [0, 1] at `at`, float64[knots, n]."""
    return np.clip(1 - np.abs(at * (knots - 1) - np.arange(knots)[:, None]), 0, 1)


@dataclass(frozen=True)
class DriftingRng:
    """Random numbers that drift from step to step, determined by (seed, key, time) on every machine.

    A `key` of ints ≥ 0 names each quantity. `time` (drift · step) counts keyframes, between which values are blended.
    """

    seed: int
    time: float = 0.0

    def constant(self, *key: int) -> np.random.Generator:
        """Returns a generator for quantities that do not drift."""
        return np.random.default_rng([self.seed, 0, *key])

    def normal(self, size: int, *key: int) -> np.ndarray:
        """Draws float64[size], standard normal; times Δ < 1 apart within a keyframe correlate by cos(Δ·π/2)."""
        keyframe, mix = self._position
        now = self._keyframe(keyframe, *key).standard_normal(size)
        if mix == 0:
            return now
        then = self._keyframe(keyframe + 1, *key).standard_normal(size)
        return math.cos(mix * math.pi / 2) * now + math.sin(mix * math.pi / 2) * then

    def uniform(self, shape: tuple[int, ...], *key: int) -> np.ndarray:
        """Draws uint16[shape], uniform; from one step to the next a fraction `drift` of the elements is redrawn."""
        keyframe, mix = self._position
        # 1. Values now; time between keyframes at which each element changes; values after
        rngs = self._keyframe(keyframe, *key), self.constant(*key), self._keyframe(keyframe + 1, *key)
        draws = (rng.integers(0, 65536, shape, dtype=np.uint16) for rng in rngs)
        now = next(draws)
        if mix > 0:
            turn, then = draws
            np.copyto(now, then, where=turn < int(mix * 65536))
        return now

    @property
    def _position(self) -> tuple[int, float]:
        """Last keyframe, and position from 0 to below 1 between it and the next."""
        keyframe = math.floor(self.time)
        return keyframe, self.time - keyframe

    def _keyframe(self, number: int, *key: int) -> np.random.Generator:
        return np.random.default_rng([self.seed, 1, number, *key])


STEPS = 512  # scores are int16 multiples of 1/STEPS logit, so that sums do not depend on rounding

ALWAYS_DENSE = np.iinfo(np.int16).max  # score of always dense blocks

_MIDDLES = (np.arange(65536) + 0.5) / 65536
_LOGISTIC = np.round(np.log(_MIDDLES / (1 - _MIDDLES)) * STEPS).astype(np.int16)


def quantize_logits(logits: np.ndarray) -> np.ndarray:
    """Rounds logits to int16 scores, clipped at ±12 (odds of 1 to 160,000), so that noise and three terms fit."""
    return np.round(np.clip(logits, -12, 12) * STEPS).astype(np.int16)


def logistic_noise(uniform: np.ndarray) -> np.ndarray:
    """Turns uniform uint16 into logistic noise as int16 scores, so that thresholds on scores are odds."""
    noise: np.ndarray = _LOGISTIC[uniform]
    return noise


def exact_counts(densities: np.ndarray, total: int, least: int, most: int) -> np.ndarray:
    """Returns blocks per head int64[H] in proportion to `densities` ≥ 0 float64[H], from `least` to `most`.

    They add up to `total`, or the nearest number within the limits.
    """
    # 1. Scale at which clipped counts add up to the total, by bisection
    heads = len(densities)
    total = min(max(total, heads * least), heads * most)
    weights = np.maximum(densities, 1e-6)
    low, high = 0.0, most / weights.min()
    for _ in range(100):
        scale = (low + high) / 2
        if np.clip(weights * scale, least, most).sum() < total:
            low = scale
        else:
            high = scale
    # 2. Round down; distribute the rest to heads with the largest remainders
    exact = np.clip(weights * low, least, most)
    counts = np.floor(exact).astype(np.int64)
    open_heads = np.flatnonzero(counts < most)
    by_rest = open_heads[np.argsort(counts[open_heads] - exact[open_heads], kind="stable")]
    counts[by_rest[: total - int(counts.sum())]] += 1
    return counts


def choose_best(scores: np.ndarray, count: int, out: np.ndarray) -> None:
    """Sets `out` (bool, like scores) at the `count` highest int16 scores, picking ties at equal distances."""
    # 1. Threshold from a histogram; at_least[s] is the number of scores ≥ s
    lowest = np.iinfo(np.int16).min
    number = np.bincount(scores.ravel().astype(np.int64) - lowest, minlength=65536)
    at_least = np.cumsum(number[::-1])[::-1]
    threshold = int(np.flatnonzero(at_least >= count)[-1])
    # 2. All scores above it, and the missing number of ties
    np.greater(scores, threshold + lowest, out=out)
    missing = count - (int(at_least[threshold]) - int(number[threshold]))
    equal = np.flatnonzero(scores.ravel() == threshold + lowest)
    out.reshape(-1)[equal[np.arange(missing) * len(equal) // max(missing, 1)]] = True
