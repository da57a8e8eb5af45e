"""The contents of `dbsp masks info`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from dbsp_cli.mask_tools.plots import heads_to_draw, mask_picture
from dbsp_cli.mask_tools.quality import HeadError, smooth_tokens, sparse_errors
from dbsp_cli.mask_tools.series import Balance, Drift, MaskSeries, balance_of, densities_of, drift_of, spread_out
from dbsp_core.layout.strategy import Strategy
from dbsp_core.masks.block_mask import BlockMask
from dbsp_core.utils.errors import UserError

__all__ = ["InfoOptions", "LayerError", "MaskInfo", "examine_masks"]


@dataclass(frozen=True)
class InfoOptions:
    """Options of `dbsp masks info`.

    Attributes:
        gpus: Ranks for which ρ_s is computed, by each of `planners`.
        threshold: P_s, above which plans are made again.
        sample: Number of layers to plan and compare; 0 for all.
        quality: Whether to measure errors.
        limit: Relative L1 error above which it warns.
        thw: The token grid, where the masks lack it.
    """

    gpus: int = 8
    planners: tuple[str, ...] = ("dbsp",)
    threshold: float = 1.10
    sample: int = 4
    quality: bool = False
    limit: float = 0.1
    thw: tuple[int, int, int] | None = None


@dataclass(frozen=True, kw_only=True)
class LayerError(HeadError):
    """A head's error in one layer's first mask."""

    layer: int


@dataclass(frozen=True, eq=False)
class MaskInfo:
    """What was found. `densities` is float64[layers, H]; `errors` is None where they were not asked for."""

    first: BlockMask
    steps: tuple[int, ...]
    layers: tuple[int, ...]
    branches: tuple[int, ...]
    densities: np.ndarray
    balance: list[Balance]
    drift: list[Drift]
    errors: list[LayerError] | None
    warnings: list[str]

    def as_json(self) -> dict[str, Any]:
        grid = self.first.grid
        return {
            **{key: getattr(grid, key) for key in ("tokens", "text_tokens", "thw", "block_q", "block_k", "nq", "nk")},
            "heads": self.first.heads,
            "orders": sorted({order for one in grid.sequences for order in one.orders}),
            "sequences": [
                {"tokens": one.tokens, "text_tokens": one.text_tokens, "thw": one.thw} for one in grid.sequences
            ],
            "steps": self.steps,
            "branches": self.branches,
            "density": {"min": self.densities.min(), "mean": self.densities.mean(), "max": self.densities.max()},
            "layers": [
                {"layer": layer, "density": heads.tolist()}
                for layer, heads in zip(self.layers, self.densities, strict=True)
            ],
            "balance": list(map(asdict, self.balance)),
            "drift": list(map(asdict, self.drift)),
            "quality": None if self.errors is None else list(map(asdict, self.errors)),
            "warnings": self.warnings,
        }

    def picture(self, title: str, series: MaskSeries) -> bytes:
        """PNG; see `mask_picture`."""
        chosen = [(self.layers[row], head) for row, head in heads_to_draw(self.densities)]
        drawn = [(layer, head, series.first(layer)) for layer, head in chosen]
        similarity = [(f"layer {each.layer}", each.steps, each.iou) for each in self.drift if each.iou]
        return mask_picture(title, self.layers, self.densities, drawn, similarity)


def examine_masks(series: MaskSeries, options: InfoOptions) -> MaskInfo:
    """Examines masks, reading one at a time. Raises UserError for options that don't fit them."""
    sampled = spread_out(series.layers, options.sample)
    first = series.first(series.layers[0], options.thw)
    densities = densities_of(series, series.layers)
    balance = balance_of(series, sampled, options.gpus, options.planners)
    strategy, planner = str(Strategy(options.gpus, 1)), options.planners[0]
    drift = [drift_of(series, layer, strategy, planner, options.threshold) for layer in sampled]
    drift = [each for each in drift if each.iou]
    errors = _errors(series, sampled, options) if options.quality else None
    warnings = [*([series.notice] if series.notice else []), *_warnings(series, densities, sampled, errors, options)]
    return MaskInfo(first, series.steps, series.layers, series.branches, densities, balance, drift, errors, warnings)


def _errors(series: MaskSeries, layers: list[int], options: InfoOptions) -> list[LayerError]:
    """Measures some heads of each sampled layer, from the emptiest to the densest, on one head of synthetic tokens."""
    tokens = None
    errors = []
    for layer in layers:
        mask = series.first(layer, options.thw)
        if mask.grid.packed_from:
            raise UserError("--quality measures masks of one sequence; these are of several that are packed")
        if mask.grid.thw is None:
            raise UserError("the masks don't say the size of the video's token grid; give --thw T,H,W for --quality")
        tokens = tokens or smooth_tokens(mask.grid.thw, mask.grid.text_tokens)
        heads = [head for _, head in heads_to_draw(mask.counts.rows.sum(axis=1)[None], 4)]
        errors += [LayerError(layer=layer, **vars(one)) for one in sparse_errors(*tokens, mask, heads=heads)]
    return errors


def _warnings(
    series: MaskSeries,
    densities: np.ndarray,
    sampled: list[int],
    errors: list[LayerError] | None,
    options: InfoOptions,
) -> list[str]:
    warnings = []
    idle = {layer: int((series.first(layer).counts.rows == 0).sum()) for layer in sampled}
    if any(idle.values()):
        worst = max(idle, key=lambda layer: idle[layer])
        warnings.append(f"rows of blocks that attend to nothing give zeros: {idle[worst]} in layer {worst}")
    if (densities == 0).any():
        row, head = np.argwhere(densities == 0)[0]
        warnings.append(
            f"{int((densities == 0).sum())} heads have no block at all, the first is layer {series.layers[row]}, "
            f"head {head}"
        )
    above = [one for one in errors or () if one.error > options.limit]
    if above:
        one = max(above, key=lambda error: error.error)
        warnings.append(
            f"relative L1 error above {options.limit:g} in {len(above)} of {len(errors or ())} heads, up to "
            f"{one.error:.3f} in layer {one.layer}, head {one.head} (density {one.density:.3f}): check --thw, token "
            "orders and whether the masks are for this model and video size"
        )
    return warnings
