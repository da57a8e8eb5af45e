"""`dbsp masks info`: statistics and a picture of a mask file or recording."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from statistics import fmean
from typing import Any, cast

import numpy as np

from dbsp_cli.mask_tools.recording import Recording
from dbsp_core.config import DbspConfig
from dbsp_core.cost.prediction import candidates, traffic_of
from dbsp_core.layout.sequence_layout import SequenceLayout
from dbsp_core.masks.block_mask import BlockMask
from dbsp_core.masks.grid import CANONICAL
from dbsp_core.masks.mask_file import MaskFile
from dbsp_core.masks.steps import DenoisingStep
from dbsp_core.planning.chunks import NEEDED
from dbsp_core.planning.plan import Plan, make_plan, plan_from_counts, usual_layout
from dbsp_core.planning.reuse import replay
from dbsp_core.reports.style import STYLE, heading, rank_colour
from dbsp_core.utils.errors import UserError

_PLANNER = "dbsp"


@dataclass(frozen=True)
class MaskSeries:
    """Masks over the steps of one CFG pass."""

    steps: tuple[int, ...]  # steps with masks (first step of each group)
    layers: tuple[int, ...]  # layers with masks at every step
    get: Callable[[int, int], BlockMask]  # (step, layer) -> mask
    branches: tuple[int, ...] = (0,)
    stopped: str | None = None  # reason why the recording ended early

    @classmethod
    def read(cls, path: str | os.PathLike[str], branch: int = 0) -> MaskSeries:
        """Reads a recording (a folder) or a mask file. Raises UserError for other paths."""
        if not os.path.isdir(path):
            file = MaskFile(path)
            if branch:
                raise UserError(f"{path} is a mask file, whose masks apply to every pass; remove --branch")
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
            recording.stopped,
        )

    def first(self, layer: int) -> BlockMask:
        return self.get(self.steps[0], layer)


def examine_masks(series: MaskSeries, gpus: int = 8) -> dict[str, Any]:
    """Computes statistics of masks, reading one at a time; plans and changes are for a few layers.

    Returns the output of `dbsp masks info --json`: the grid, "density" of all and by head in "layers", "balance" of
    `gpus` per strategy (means over layers; "kv_all" and "kv_needed" are the keys and values that a rank receives under
    `keys: all` and `needed`, relative to one rank's q), "drift" of each layer, and "warnings".
    """
    # 1. Density of all layers, float64[layers, H], where H includes batch items with their own masks
    rows = [mask.counts.rows.sum(axis=1) / mask.grid.pairs for mask in map(series.first, series.layers)]
    most = max(map(len, rows))  # dense layers have masks of one batch item
    densities = np.array([np.tile(row, most // len(row)) for row in rows])
    # 2. Plans of sampled layers for each strategy, without rings longer than the number of KV blocks
    sampled = spread_out(series.layers, 4)
    masks = [series.first(layer) for layer in sampled]
    balance = []
    for strategy in candidates(gpus, min((mask.grid for mask in masks), key=lambda grid: grid.nk)):
        plans, received = [], []
        for mask in masks:
            grid = mask.grid.with_orders((CANONICAL,))
            layout = usual_layout(_PLANNER, grid, strategy)
            plans.append(make_plan(mask, strategy, _PLANNER, layout=layout))
            contiguous = SequenceLayout.contiguous(grid.tokens, gpus)
            needed = make_plan(mask, strategy, _PLANNER, layout=contiguous, keys=NEEDED, compare=False)
            both = traffic_of(plans[-1], layout).kv_received, traffic_of(needed, contiguous).kv_received
            received.append(np.array(both) * gpus / (mask.heads * grid.tokens))
        numbers = ("rho_before", "rho", "rho_bound", "moved")
        means = {name: fmean(getattr(plan, name) for plan in plans) for name in numbers}
        kv_all, kv_needed = np.mean(received, axis=0).tolist()
        of_keys = {"kv_all": kv_all, "kv_needed": kv_needed}
        balance.append({"strategy": str(strategy), **means, "rho_max": max(plan.rho for plan in plans), **of_keys})
    # 3. Changes from step to step
    drift = [_drift(series, layer, gpus) for layer in sampled] if len(series.steps) > 1 else []
    # 4. Warnings
    warnings = [f"the recording ended early: {series.stopped}"] if series.stopped else []
    idle = [int((mask.counts.rows == 0).sum()) for mask in masks]
    if any(idle):
        worst = sampled[idle.index(max(idle))]
        warnings.append(f"{max(idle)} rows in layer {worst} have no active blocks and output zeros")
    empty = np.argwhere(densities == 0)
    if len(empty):
        first = f"layer {series.layers[empty[0][0]]}, head {empty[0][1]}"
        warnings.append(f"{len(empty)} heads have no active blocks, the first is {first}")
    grid, by_layer = masks[0].grid, zip(series.layers, densities.tolist(), strict=True)
    return {
        **{key: getattr(grid, key) for key in ("tokens", "text_tokens", "thw", "block_q", "block_k", "nq", "nk")},
        "heads": masks[0].heads,
        "orders": sorted(set(grid.orders)),
        "steps": series.steps,
        "branches": series.branches,
        "density": {"min": densities.min(), "mean": densities.mean(), "max": densities.max()},
        "layers": [{"layer": layer, "density": heads} for layer, heads in by_layer],
        "balance": balance,
        "drift": [layer for layer in drift if layer["iou"]],
        "warnings": warnings,
    }


def _drift(series: MaskSeries, layer: int, gpus: int) -> dict[str, Any]:
    """Compares each step's mask of a layer with the previous one, and counts the plans of a run on Ulysses.

    For each pair of equal shape, "steps" has the later step, "iou" the active blocks in both over either, and
    "changed" the fraction of blocks that differ; "replans" includes the first plan.
    """
    grid = series.first(layer).grid

    def plan(rows: np.ndarray, _current: Plan | None) -> Plan:
        return plan_from_counts(rows, grid, f"U{gpus}R1", _PLANNER, compare=False)

    steps, counts, iou, changed = [], [], [], []
    before: BlockMask | None = None
    for step in series.steps:
        mask = series.get(step, layer)
        counts.append(mask.counts.rows)
        if before is not None and mask.bits.shape == before.bits.shape:
            either = int((mask.bits | before.bits).sum())
            differ = int((mask.bits ^ before.bits).sum())
            steps.append(step)
            iou.append((either - differ) / either if either else 1.0)
            changed.append(differ / mask.bits.numel())
        before = mask
    made = sum(use.new for use in replay(counts, DbspConfig.reuse, plan, lag=False))
    return {"layer": layer, "steps": steps, "iou": iou, "changed": changed, "replans": made}


def spread_out(values: Sequence[int], count: int) -> list[int]:
    """Picks at most `count` evenly spaced values, including the first and last."""
    return [values[i] for i in np.unique(np.linspace(0, len(values) - 1, min(count, len(values))).round().astype(int))]


def mask_picture(title: str, series: MaskSeries, facts: Mapping[str, Any]) -> bytes:
    """Draws a PNG: density of heads × layers, masks of three heads, and changes over steps if there are several."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    densities = np.array([layer["density"] for layer in facts["layers"]])
    by_density = np.argsort(densities, axis=None, kind="stable").tolist()
    places = [divmod(place, densities.shape[1]) for place in spread_out(by_density, 3)]
    drawn = [(series.layers[row], head) for row, head in places]
    below = len(drawn) + bool(facts["drift"])
    picture = BytesIO()
    with rc_context({**STYLE, "axes.grid": False}):
        figure = Figure(figsize=(max(9.0, 2.7 * below), 7.4), layout="constrained")
        FigureCanvasAgg(figure)
        note = f"{title}: mean density {densities.mean():.3f}; below, heads from the emptiest to the densest"
        heading(figure, "Which blocks do the masks keep?", note)
        upper, lower = cast(Any, figure.subfigures(2, 1, height_ratios=(1.0, 1.15)))
        # 1. Density of heads × layers
        axis = upper.subplots()
        image = axis.imshow(densities.T, aspect="auto", cmap="viridis", vmin=0, vmax=1, interpolation="nearest")
        shown = spread_out(range(len(series.layers)), 20)
        axis.set(xlabel="layer", ylabel="head", xticks=shown, xticklabels=[series.layers[i] for i in shown])
        axis.yaxis.get_major_locator().set_params(integer=True)
        upper.colorbar(image, ax=axis, label="density: share of blocks computed")
        # 2. Masks of some heads
        axes = np.atleast_1d(lower.subplots(1, below))
        for axis, (layer, head) in zip(axes, drawn, strict=False):
            mask = series.first(layer)
            head %= mask.heads
            bits, order = mask.square(head).cpu().numpy(), mask.grid.order_of(head)
            names = order if isinstance(order, str) else ", ".join(dict.fromkeys(order))
            axis.imshow(bits, cmap="Greys", vmin=0, vmax=1, interpolation="antialiased")  # many blocks: local means
            axis.set_title(f"layer {layer}, head {head} ({names})\ndensity {bits.mean():.3f}", fontsize=10)
            axis.set(xlabel="key block", ylabel="query block")
        # 3. Change from step to step
        for number, drift in enumerate(facts["drift"]):
            style = {"markersize": 3.5, "color": rank_colour(number), "label": f"layer {drift['layer']}"}
            axes[-1].plot(drift["steps"], drift["iou"], "o-", **style)
        if facts["drift"]:
            axes[-1].set(xlabel="step", ylabel="IoU with the step before", ylim=(0, 1.03))
            axes[-1].set_title("How masks drift\nfrom step to step", fontsize=10)
            axes[-1].xaxis.get_major_locator().set_params(integer=True)
            axes[-1].legend(fontsize=9, loc="lower left")
        figure.savefig(picture, format="png")
    return picture.getvalue()
