"""The masks of a mask file or a recording, by moment and layer, and their statistics."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from dbsp_cli.mask_tools.recording import Recording
from dbsp_core.cost.selection import candidates
from dbsp_core.layout.sequence_layout import SequenceLayout
from dbsp_core.masks.block_mask import BlockMask
from dbsp_core.masks.mask_file import MaskFile
from dbsp_core.masks.schedule import DenoisingStep
from dbsp_core.masks.token_order import CANONICAL
from dbsp_core.planning.plan import Plan, make_plan
from dbsp_core.planning.planners import require_planner
from dbsp_core.runtime.session.plan_cache import PlanCache
from dbsp_core.utils.errors import UserError

__all__ = ["Balance", "Drift", "MaskSeries", "balance_of", "densities_of", "drift_of", "spread_out"]


@dataclass(frozen=True)
class MaskSeries:
    """Masks over the steps of one guidance branch.

    Attributes:
        steps: First step of each moment that has masks.
        layers: The layers that every moment has.
        notice: What a reader should know, such as that the recording was cut short; or None.
    """

    steps: tuple[int, ...]
    layers: tuple[int, ...]
    get: Callable[[int, int], BlockMask]
    branches: tuple[int, ...] = (0,)
    notice: str | None = None

    @classmethod
    def read(cls, path: str | os.PathLike[str], branch: int = 0) -> MaskSeries:
        """Reads a recording (a folder) or a mask file. Raises UserError for anything else."""
        return cls._of_recording(path, branch) if os.path.isdir(path) else cls._of_file(path)

    @classmethod
    def _of_file(cls, path: str | os.PathLike[str]) -> MaskSeries:
        file = MaskFile(path)
        steps = file.groups.starts if file.groups else (0,)
        return cls(steps, tuple(range(file.layers)), lambda step, layer: file.layer(layer, steps.index(step)))

    @classmethod
    def _of_recording(cls, path: str | os.PathLike[str], branch: int) -> MaskSeries:
        recording = Recording.read(path)
        branches = tuple(sorted({moment.cfg_branch for moment in recording.passes}))
        steps = tuple(sorted(moment.step for moment in recording.passes if moment.cfg_branch == branch))
        if not steps or not recording.recorded_layers:
            raise UserError(f"{path} has no masks of branch {branch}; it has branches {list(branches)}")
        stopped = recording.stopped and f"the recording stopped before the run did: {recording.stopped}"
        return cls(
            steps,
            recording.recorded_layers,
            lambda step, layer: recording.mask(layer, DenoisingStep(step, branch)),
            branches,
            stopped or None,
        )

    def first(self, layer: int, thw: tuple[int, int, int] | None = None) -> BlockMask:
        """Returns a layer's first mask, with token grid `thw` if given. Raises UserError where that does not fit."""
        mask = self.get(self.steps[0], layer)
        return mask if thw is None else replace(mask, grid=replace(mask.grid, thw=thw))


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
        steps: Of each pair of neighbours of one shape, the later step.
        iou: Of each pair, the share of their dense blocks that both have.
        changed: Of each pair, the share of all blocks that differ.
        replans: Plans made, the first included, as a run makes them by the rule given.
    """

    layer: int
    steps: tuple[int, ...]
    iou: tuple[float, ...]
    changed: tuple[float, ...]
    replans: int


def spread_out(values: Sequence[int], count: int) -> list[int]:
    """Picks at most `count` values, evenly spread, the first and last among them; all for 0."""
    if count <= 0 or count >= len(values):
        return list(values)
    return [values[i] for i in np.unique(np.linspace(0, len(values) - 1, count).round().astype(int))]


def densities_of(series: MaskSeries, layers: Sequence[int]) -> np.ndarray:
    """float64[layers, H]: the density by head of each layer's first mask.

    Where batch items have masks of their own, H counts the heads of all of them.
    """
    rows = []
    for layer in layers:
        mask = series.first(layer)
        rows.append(mask.counts.rows.sum(axis=1) / mask.grid.pairs)
    most = max(map(len, rows))  # dense layers have one batch item's
    return np.array([np.tile(row, -(-most // len(row)))[:most] for row in rows])


def balance_of(series: MaskSeries, layers: Sequence[int], gpus: int, planners: Sequence[str]) -> list[Balance]:
    """Plans the layers' first masks, one row per strategy and planner, without rings longer than the KV blocks."""
    rows = []
    masks = [series.first(layer) for layer in layers]
    for strategy in candidates(gpus, min((mask.grid for mask in masks), key=lambda grid: grid.nk)):
        for planner in planners:
            name, plans = require_planner(planner).layout, []
            for mask in masks:
                layout = SequenceLayout.named(name, mask.grid.with_orders((CANONICAL,)), strategy)
                plans.append(make_plan(mask, strategy, planner, layout=layout))
            before, rho, moved = (
                float(np.mean([getattr(plan, value) for plan in plans])) for value in ("rho_before", "rho", "moved")
            )
            rows.append(Balance(str(strategy), planner, before, rho, max(plan.rho for plan in plans), moved))
    return rows


def drift_of(series: MaskSeries, layer: int, strategy: str, planner: str, threshold: float) -> Drift:
    """Compares all recorded steps of one layer, which is an attention as a run keeps plans for."""

    def plan(mask: BlockMask, _current: Plan | None) -> Plan:
        return make_plan(mask, strategy, planner, compare=False)

    cache = PlanCache(threshold, compare=False)
    steps: list[int] = []
    iou, changed = [], []
    before: BlockMask | None = None
    for step in series.steps:
        mask = series.get(step, layer)
        cache.plan_for(layer, mask, plan)
        if before is not None and mask.bits.shape == before.bits.shape:
            steps.append(step)
            either = int((mask.bits | before.bits).sum())
            differ = int((mask.bits ^ before.bits).sum())
            iou.append((either - differ) / either if either else 1.0)
            changed.append(differ / mask.bits.numel())
        before = mask
    return Drift(layer, tuple(steps), tuple(iou), tuple(changed), cache.counters.replans)
