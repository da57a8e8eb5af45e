"""Figures of `dbsp masks info` about a mask file, and about masks over denoising steps."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

import numpy as np

from dbsp_cli.mask_tools.plots import heads_to_draw, mask_picture, spread_out
from dbsp_cli.mask_tools.quality import DEFAULT_LIMIT, HeadError, smooth_tokens, sparse_errors
from dbsp_cli.mask_tools.recording import Recording
from dbsp_core.config import DbspConfig
from dbsp_core.cost.prediction import candidates
from dbsp_core.layout.strategy import Strategy
from dbsp_core.masks.block_mask import BlockMask
from dbsp_core.masks.grid import CANONICAL
from dbsp_core.masks.mask_file import MaskFile
from dbsp_core.masks.steps import DenoisingStep
from dbsp_core.planning.plan import Plan, make_plan, plan_from_counts, usual_layout
from dbsp_core.runtime.plan_keeper import replay
from dbsp_core.utils.errors import UserError

_SAMPLE = 4
"""Layers that are planned and compared, spread over all."""
_PLANNER = "dbsp"


@dataclass(frozen=True)
class MaskSeries:
    """Masks over the steps of one CFG pass.

    Attributes:
        steps: First step of each moment that has masks.
        layers: The layers that every moment has.
        notice: Notice for a reader, such as that the recording was cut short; or None.
    """

    steps: tuple[int, ...]
    layers: tuple[int, ...]
    get: Callable[[int, int], BlockMask]
    branches: tuple[int, ...] = (0,)
    notice: str | None = None

    @classmethod
    def read(cls, path: str | os.PathLike[str], branch: int = 0) -> MaskSeries:
        """Reads a recording (a folder) or a mask file. Raises UserError for anything else."""
        if not os.path.isdir(path):
            file = MaskFile(path)
            if branch:
                raise UserError(f"{path} is a mask file, whose masks are of every pass; leave out --branch")
            starts = file.groups.starts if file.groups else (0,)
            layers = tuple(range(file.layers))
            return cls(starts, layers, lambda step, layer: file.layer(layer, starts.index(step)))
        recording = Recording.read(path)
        branches = tuple(sorted({moment.cfg_branch for moment in recording.passes}))
        steps = tuple(sorted(moment.step for moment in recording.passes if moment.cfg_branch == branch))
        if not steps or not recording.recorded_layers:
            raise UserError(f"{path} has no masks of branch {branch}; it has branches {list(branches)}")
        return cls(
            steps,
            recording.recorded_layers,
            lambda step, layer: recording.mask(layer, DenoisingStep(step, branch)),
            branches,
            f"the recording stopped before the run did: {recording.stopped}" if recording.stopped else None,
        )

    def first(self, layer: int) -> BlockMask:
        """Returns a layer's first mask."""
        return self.get(self.steps[0], layer)


@dataclass(frozen=True)
class Balance:
    """ρ_s over layers, before (contiguous) and by planner: means, and the maximum."""

    strategy: str
    planner: str
    rho_before: float
    rho: float
    rho_max: float
    moved: float


@dataclass(frozen=True)
class Drift:
    """The changes of a layer's mask from one recorded step to the next.

    Attributes:
        steps: The later step of each pair of neighbours of one shape.
        iou: Share of each pair's active blocks that both have.
        changed: Share of each pair's blocks that differ.
        replans: Plans made, the first included, as a run makes them by the rule given.
    """

    layer: int
    steps: tuple[int, ...]
    iou: tuple[float, ...]
    changed: tuple[float, ...]
    replans: int


def densities_of(series: MaskSeries, layers: Sequence[int]) -> np.ndarray:
    """Returns float64[layers, H]: the density by head of each layer's first mask.

    Where batch items have masks of their own, H counts the heads of all of them.
    """
    rows = []
    for layer in layers:
        mask = series.first(layer)
        rows.append(mask.counts.rows.sum(axis=1) / mask.grid.pairs)
    most = max(map(len, rows))  # dense layers have one batch item's
    return np.array([np.tile(row, -(-most // len(row)))[:most] for row in rows])


def balance_of(series: MaskSeries, layers: Sequence[int], gpus: int, planner: str = _PLANNER) -> list[Balance]:
    """Plans the layers' first masks for each strategy, without rings longer than the KV blocks."""
    masks, found = [series.first(layer) for layer in layers], []
    for strategy in candidates(gpus, min((mask.grid for mask in masks), key=lambda grid: grid.nk)):
        layouts = [usual_layout(planner, mask.grid.with_orders((CANONICAL,)), strategy) for mask in masks]
        plans = [
            make_plan(mask, strategy, planner, layout=layout) for mask, layout in zip(masks, layouts, strict=True)
        ]
        before, rho, moved = (fmean(getattr(plan, name) for plan in plans) for name in ("rho_before", "rho", "moved"))
        found.append(Balance(str(strategy), planner, before, rho, max(plan.rho for plan in plans), moved))
    return found


def drift_of(series: MaskSeries, layer: int, strategy: str, planner: str, threshold: float) -> Drift:
    """Compares all recorded steps of one layer, which is an attention as a run keeps plans for."""

    grid = series.first(layer).grid

    def plan(rows: np.ndarray, _current: Plan | None) -> Plan:
        return plan_from_counts(rows, grid, strategy, planner, compare=False)

    steps: list[int] = []
    counts: list[np.ndarray] = []
    iou, changed = [], []
    before: BlockMask | None = None
    for step in series.steps:
        mask = series.get(step, layer)
        counts.append(mask.counts.rows)
        if before is not None and mask.bits.shape == before.bits.shape:
            steps.append(step)
            either = int((mask.bits | before.bits).sum())
            differ = int((mask.bits ^ before.bits).sum())
            iou.append((either - differ) / either if either else 1.0)
            changed.append(differ / mask.bits.numel())
        before = mask
    made = sum(use.new for use in replay(counts, threshold, plan, lag=False))
    return Drift(layer, tuple(steps), tuple(iou), tuple(changed), made)


@dataclass(frozen=True, eq=False)
class MaskInfo:
    """Statistics of masks.

    Attributes:
        densities: float64[layers, H].
        errors: Heads' errors with their layers, or None if they were not asked for.
    """

    first: BlockMask
    steps: tuple[int, ...]
    layers: tuple[int, ...]
    branches: tuple[int, ...]
    densities: np.ndarray
    balance: list[Balance]
    drift: list[Drift]
    errors: list[tuple[int, HeadError]] | None
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
            "quality": None if self.errors is None else [{"layer": i} | asdict(one) for i, one in self.errors],
            "warnings": self.warnings,
        }

    def picture(self, title: str, series: MaskSeries) -> bytes:
        """Draws a PNG; see `mask_picture`."""
        chosen = [(self.layers[row], head) for row, head in heads_to_draw(self.densities)]
        drawn = [(layer, head % series.first(layer).heads, series.first(layer)) for layer, head in chosen]
        similarity = [(f"layer {each.layer}", each.steps, each.iou) for each in self.drift if each.iou]
        return mask_picture(title, self.layers, self.densities, drawn, similarity)


def examine_masks(series: MaskSeries, gpus: int = 8, quality: bool = False) -> MaskInfo:
    """Examines masks, reading one at a time. Plans, changes and errors are those of a few layers.

    Args:
        gpus: Ranks for which ρ_s is computed.
        quality: True to measure errors, which needs masks that have a token grid.
    """
    sampled = spread_out(series.layers, _SAMPLE)
    first = series.first(series.layers[0])
    densities = densities_of(series, series.layers)
    balance = balance_of(series, sampled, gpus)
    drift = [drift_of(series, layer, str(Strategy(gpus, 1)), _PLANNER, DbspConfig.reuse) for layer in sampled]
    drift = [each for each in drift if each.iou]
    errors = _errors(series, sampled) if quality else None
    warnings = [*filter(None, [series.notice]), *_warnings(series, densities, sampled, errors or ())]
    return MaskInfo(first, series.steps, series.layers, series.branches, densities, balance, drift, errors, warnings)


def _errors(series: MaskSeries, layers: Sequence[int]) -> list[tuple[int, HeadError]]:
    """Measures some heads of each sampled layer, from the emptiest to the densest, on one head of synthetic tokens."""
    errors, tokens = [], None
    for layer in layers:
        mask = series.first(layer)
        if mask.grid.packed_from:
            raise UserError("--quality measures masks of one sequence; these are of several that are packed")
        if mask.grid.thw is None:
            raise UserError("the masks don't say the size of the video's token grid; convert them with thw=T,H,W")
        tokens = tokens or smooth_tokens(mask.grid.thw, mask.grid.text_tokens)
        heads = [head for _, head in heads_to_draw(mask.counts.rows.sum(axis=1)[None], 4)]
        errors += [(layer, one) for one in sparse_errors(*tokens, mask, heads=heads)]
    return errors


def _warnings(
    series: MaskSeries, densities: np.ndarray, sampled: Sequence[int], errors: Sequence[tuple[int, HeadError]]
) -> list[str]:
    warnings = []
    idle = {layer: int((series.first(layer).counts.rows == 0).sum()) for layer in sampled}
    worst = max(idle, key=lambda layer: idle[layer])
    if idle[worst]:
        warnings.append(f"rows of blocks that attend to nothing give zeros: {idle[worst]} in layer {worst}")
    empty = np.argwhere(densities == 0)
    if len(empty):
        row, head = empty[0]
        warnings.append(
            f"{len(empty)} heads have no block at all, the first is layer {series.layers[row]}, head {head}"
        )
    above = [(layer, one) for layer, one in errors if one.error > DEFAULT_LIMIT]
    if above:
        layer, one = max(above, key=lambda pair: pair[1].error)
        warnings.append(
            f"relative L1 error above {DEFAULT_LIMIT:g} in {len(above)} of {len(errors)} heads, up to {one.error:.3f} "
            f"in layer {layer}, head {one.head} (density {one.density:.3f}): check thw, token orders and whether the "
            "masks are for this model and video size"
        )
    return warnings
