"""Random numbers that any call of any layer can ask for alone, and that change slowly from call to call. numpy alone.

A drifting quantity has keyframes, drawn independently, and moves from one to the next in 1 / drift calls. So the state
at call t needs no states before it, every rank gets the same, and after 1 / drift calls nothing of the old is left.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

__all__ = ["Draws"]


@dataclass(frozen=True)
class Draws:
    """seed: ≥ 0; age: drift · call, the number of keyframes passed. A `key` of ints ≥ 0 names each quantity."""

    seed: int
    age: float = 0.0

    def fixed(self, *key: int) -> np.random.Generator:
        """A generator for what does not drift."""
        return np.random.default_rng([self.seed, 0, *key])

    def normal(self, size: int, *key: int) -> np.ndarray:
        """float64[size], standard normal at every age; ages Δ < 1 apart within a keyframe correlate by cos(Δ·π/2)."""
        keyframe, mix = self._moment
        now = self._keyframe(keyframe, *key).standard_normal(size)
        if mix == 0:
            return now
        then = self._keyframe(keyframe + 1, *key).standard_normal(size)
        return math.cos(mix * math.pi / 2) * now + math.sin(mix * math.pi / 2) * then

    def noise(self, shape: tuple[int, ...], *key: int) -> np.ndarray:
        """uint16[shape], uniform; from one call to the next a share `drift` of the elements is drawn anew."""
        keyframe, mix = self._moment
        now = _uint16(self._keyframe(keyframe, *key), shape)
        if mix == 0:
            return now
        turn = _uint16(self.fixed(*key), shape)  # when, between keyframes, each element's time comes
        np.copyto(now, _uint16(self._keyframe(keyframe + 1, *key), shape), where=turn < int(mix * 65536))
        return now

    @property
    def _moment(self) -> tuple[int, float]:
        """(last keyframe passed, how far on the way to the next, 0 ≤ … < 1)."""
        keyframe = math.floor(self.age)
        return keyframe, self.age - keyframe

    def _keyframe(self, number: int, *key: int) -> np.random.Generator:
        return np.random.default_rng([self.seed, 1, number, *key])


def _uint16(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return rng.integers(0, 65536, shape, dtype=np.uint16)
