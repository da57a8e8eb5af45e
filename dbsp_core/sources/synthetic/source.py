"""Synthetic masks, with presets fitted to the paper's Table 1."""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import numpy as np
import torch

from dbsp_core.masks.block_mask import BlockMask
from dbsp_core.masks.grid import BlockGrid
from dbsp_core.sources.base import BlockSizes, Changes, MaskRequest
from dbsp_core.sources.synthetic.patterns import (
    ALWAYS_DENSE,
    BlockPositions,
    DriftingRng,
    always_dense,
    choose_best,
    exact_counts,
    logistic_noise,
    pattern_shapes,
    profile_basis,
    quantize_logits,
)
from dbsp_core.utils.errors import require_value
from dbsp_core.utils.schema import require_choice


class Style(NamedTuple):
    """Statistics of synthetic masks; see `SyntheticSource`."""

    density: float
    spread: float
    head_concentration: float
    drift: float = 0.0


DEFAULT_STYLE = Style(density=0.4, spread=0.6, head_concentration=8.0)

# Fitted by bisection to rows of Table 1; docs/results/even.md says which, and how well the other rows agree.
_WAN = Style(density=0.414, spread=0.432, head_concentration=3.8)
_COGVIDEOX = Style(density=0.414, spread=0.643, head_concentration=1.54)

PRESETS: dict[str, Style] = {
    "wan2.1-t2v-14b": _WAN,
    "cogvideox1.5-5b": _COGVIDEOX,
    "wan2.1-t2v-14b-sparge": _WAN._replace(head_concentration=2.18, drift=0.015),
    "cogvideox1.5-5b-sparge": _COGVIDEOX._replace(head_concentration=0.78, drift=0.015),
}
"""Styles by the name after `preset:`, of PAROAttention or of SpargeAttn (masks change from step to step)."""

PROFILE_CORRELATION = 0.9  # correlation of the row and column profiles of two heads of a layer
LAYER_SIMILARITY = 0.5  # correlation of the profiles that two layers' heads share
PATTERN_STRENGTH = 4.0  # height of a head's pattern over the background, in logits


class _Stream(IntEnum):
    """First part of every key: the drawn quantity."""

    DENSITY, BETA, PATTERN, STRENGTH, SINKS, ROWS, COLUMNS, SHARED_ROWS, SHARED_COLUMNS, NOISE = range(10)


_ALL_LAYERS = 1 << 30  # layer number in keys of quantities shared by all layers


@dataclass(frozen=True)
class SyntheticSource(BlockSizes):
    """Synthetic masks with the statistics of a preset or `DEFAULT_STYLE`, overridden by the other settings.

    A block is dense with odds of exp(pattern + row profile + column profile + the head's level); each head takes its
    best-scored blocks, exactly as many as its density requires. The diagonal and all text are always dense. The mask
    depends on seed, layer and step only.

    Attributes:
        density: Mean fraction of active blocks over the heads of a layer, met exactly.
        spread: Standard deviation of the profiles of rows and columns, in logits.
        head_concentration: α + β of the Beta distribution of head densities; smaller makes heads differ more.
        drift: Fraction of a mask that is redrawn from one step to the next; 0 makes masks static.
    """

    preset: str | None = None
    density: float | None = None
    spread: float | None = None
    head_concentration: float | None = None
    drift: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.preset is not None:
            require_choice("preset", self.preset, tuple(PRESETS))
        require_value(self, "seed", self.seed >= 0, "must not be negative")
        style = self.style
        for name in ("density", "drift"):
            require_value(self, name, 0 <= getattr(style, name) <= 1, "must lie between 0 and 1")
        require_value(self, "spread", 0 <= style.spread <= 5, "must lie between 0 and 5 (logits)")
        positive = style.head_concentration > 0
        require_value(self, "head_concentration", positive, "must be positive; 10 makes heads similar")

    @property
    def style(self) -> Style:
        """The effective statistics."""
        settings = {name: getattr(self, name) for name in Style._fields}
        changed = {name: value for name, value in settings.items() if value is not None}
        return (PRESETS[self.preset] if self.preset else DEFAULT_STYLE)._replace(**changed)

    @property
    def changes(self) -> Changes:
        return "per_step" if self.style.drift else "never"

    def cache_key(self, request: MaskRequest) -> Hashable:
        return request.layer, request.step if self.style.drift else 0

    def mask(self, request: MaskRequest) -> BlockMask:
        grid, style = self.grid(request), self.style
        rng = DriftingRng(self.seed, style.drift * request.step)
        return BlockMask(torch.from_numpy(_Layer(style, rng, request, grid).bits()), grid)


@dataclass(frozen=True)
class _Layer:
    """One layer's mask at one step, with one head's scores in memory at a time."""

    style: Style
    rng: DriftingRng
    request: MaskRequest
    grid: BlockGrid

    def bits(self) -> np.ndarray:
        """Returns bool[H, nq, nk]."""
        heads, layer = self.request.heads, self.request.layer
        axes, text_tokens = (self.grid.q_axis, self.grid.k_axis), self.grid.text_tokens
        q, k = (BlockPositions.from_axis(axis, text_tokens, self.request.thw) for axis in axes)
        # 1. Scores of rows, columns and patterns (in sixteenths, the unit of a head's strength)
        rows = quantize_logits(self._profiles(q, _Stream.ROWS, _Stream.SHARED_ROWS))
        columns = quantize_logits(self._profiles(k, _Stream.COLUMNS, _Stream.SHARED_COLUMNS))
        shapes = pattern_shapes(q, k, self.rng.constant(_Stream.SINKS, layer))
        patterns = [quantize_logits(shape * (PATTERN_STRENGTH / 16)) for shape in shapes]  # int16[nq, nk]
        kinds = self.rng.constant(_Stream.PATTERN, layer).integers(0, len(shapes), heads)
        strengths = self.rng.constant(_Stream.STRENGTH, layer).integers(8, 24, heads, dtype=np.int16, endpoint=True)
        # 2. Blocks per head int64[H], with exactly the style's mean density
        forced = always_dense(self.grid)
        total = round(self.style.density * heads * forced.size)
        counts = exact_counts(self._densities(), total, least=int(forced.sum()), most=forced.size)
        # 3. Best blocks of each head
        bits = np.empty((heads, *forced.shape), dtype=bool)
        for head in range(heads):
            scores = logistic_noise(self.rng.uniform(forced.shape, _Stream.NOISE, layer, head))
            scores += patterns[kinds[head]] * strengths[head]
            scores += rows[head][:, None]
            scores += columns[head]
            scores[forced] = ALWAYS_DENSE
            choose_best(scores, int(counts[head]), out=bits[head])
        return bits

    def _densities(self) -> np.ndarray:
        """Returns Beta-distributed densities float64[H]; heads' quantiles drift, the distribution does not."""
        concentration = self.style.head_concentration
        alpha = max(self.style.density, 1e-3) * concentration
        beta = max(1 - self.style.density, 1e-3) * concentration
        sample = np.sort(self.rng.constant(_Stream.BETA).beta(alpha, beta, 4096))  # sampled inverse CDF
        normal = self.rng.normal(self.request.heads, _Stream.DENSITY, self.request.layer)
        quantile = [(1 + math.erf(z / math.sqrt(2))) / 2 for z in normal]
        return np.interp(quantile, (np.arange(4096) + 0.5) / 4096, sample)

    def _profiles(self, positions: BlockPositions, of_head: _Stream, shared: _Stream) -> np.ndarray:
        """Returns profiles float64[H, n] in logits, with mean 0 and deviation `spread` over the video; 0 for text."""
        # 1. Standard normal weights float64[H, B], correlated across heads and layers
        basis, rng, layer = profile_basis(positions), self.rng, self.request.layer
        size = len(basis)
        common = _blend(rng.normal(size, shared, _ALL_LAYERS), rng.normal(size, shared, layer), LAYER_SIMILARITY)
        each = rng.normal(self.request.heads * size, of_head, layer).reshape(-1, size)
        weights = _blend(common, each, PROFILE_CORRELATION)
        # 2. Profiles, normalized to the style's spread
        profiles = (weights[:, :, None] * basis).sum(axis=1)  # not a matmul, whose rounding depends on the machine
        video = ~positions.is_text
        profiles -= profiles[:, video].mean(axis=1, keepdims=True)
        deviation = profiles[:, video].std(axis=1, keepdims=True)
        profiles *= self.style.spread / np.maximum(deviation, 1e-9)
        profiles[:, ~video] = 0
        return profiles


def _blend(common: np.ndarray, other: np.ndarray, correlation: float) -> np.ndarray:
    """Blends standard normals so that two blends with the same `common` have this correlation."""
    return math.sqrt(correlation) * common + math.sqrt(1 - correlation) * other
