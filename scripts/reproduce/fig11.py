"""Fig. 11: the threshold P_s against the ρ_s in use and the plans made, over 50 denoising steps of drifting masks.

Ulysses on 8 GPUs, Wan2.1 under SpargeAttn. Nothing but the heads' densities matters there, and masks meet them exactly
at any size: so the video is smaller than the model's.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import numpy as np
from matplotlib.figure import Figure

from dbsp_core import BlockGrid, BlockMask
from dbsp_core.planning.plan import plan_from_counts
from dbsp_core.planning.reuse import MakePlan, PlanUse, replay
from dbsp_core.sources import MaskRequest
from scripts.reproduce.common import FIG_11, MEASURED, arguments, layer_count, preset_model, preset_source
from scripts.results.colours import PLANNERS as COLOURS
from scripts.results.figures import STAR, imbalance_axis, in_words, legend_below, panels
from scripts.results.result import Result, Row

PRESET = "wan2.1-t2v-14b-sparge"
STRATEGY = "U8R1"
VIDEO = (21, 9, 16)
PLANNERS = "paper", "dbsp"
THRESHOLDS = (1.03, 1.05, 1.07, 1.10, 1.15, 1.20, 1.30)


def masks_by_step(layer: int, options: argparse.Namespace) -> list[BlockMask]:
    source, model = preset_source(PRESET, options), preset_model(PRESET)
    return [source.mask(MaskRequest(layer, model.heads, VIDEO, step=call)) for call in range(FIG_11["steps"])]


def replans_and_rho(options: argparse.Namespace, planner: str, thresholds: tuple[float, ...]) -> list[Row]:
    """One row per threshold. replans: plans made in 50 steps, the first included; rho: of the plan in use"""
    uses: dict[float, list[PlanUse]] = {threshold: [] for threshold in thresholds}
    layers = layer_count(PRESET, options)
    for layer in range(layers):
        masks = masks_by_step(layer, options)
        make, counts = plans_on(masks[0].grid, planner), [mask.counts.rows for mask in masks]
        for threshold, of_threshold in uses.items():
            of_threshold += replay(counts, threshold, make, lag=False)
    rows = []
    for threshold, of_threshold in uses.items():
        rho = [use.counted.rho for use in of_threshold if use.counted is not None]
        paper = f"{FIG_11['replans']} (fitted)" if threshold == FIG_11["threshold"] else "–"
        rows.append(
            Row(
                planner=planner,
                threshold=threshold,
                replans=sum(use.new for use in of_threshold) / layers,
                paper=paper,
                rho=float(np.mean(rho)),
                rho_max=max(rho),
                label=f"{MEASURED}, drift fitted to the paper's one point",
                layers=layers,
            )
        )
    return rows


def plans_on(grid: BlockGrid, planner: str) -> MakePlan:
    return lambda rows, _current: plan_from_counts(rows, grid, STRATEGY, planner, compare=False)


def draw(rows: list[Row]) -> Figure:
    figure, axes = panels(
        "How often must a plan be made again over 50 denoising steps?",
        f"{in_words(PRESET)}, {STRATEGY}; {MEASURED} whose drift is fitted to the paper's one point",
        columns=2,
    )
    left, right = axes[0]
    for planner in dict.fromkeys(row.planner for row in rows):
        here = [row for row in rows if row.planner == planner]
        thresholds = [row.threshold for row in here]
        colour = COLOURS[planner]
        left.plot(thresholds, [row.replans for row in here], "o-", color=colour, label=f"planner {planner}")
        right.plot(thresholds, [row.rho for row in here], "o-", color=colour)
    left.plot(FIG_11["threshold"], FIG_11["replans"], **STAR, label="paper, §4.2.1")
    left.set(xlabel="threshold P_s: kept while ρ_s is at most", ylabel="plans made in 50 steps", yscale="log")
    left.set(ylim=(0.9, 60), title="A higher threshold saves plans…")
    left.set_yticks([1, 2, 5, 10, 20, 50], ["1", "2", "5", "10", "20", "50"])
    left.minorticks_off()
    right.set(xlabel="threshold P_s", title="…and costs balance")
    imbalance_axis(right)
    legend_below(figure, left)
    return figure


REUSE = Result("fig11", f"P_s against ρ_s and replans, {PRESET}, {STRATEGY}", draw)


def measure(options: argparse.Namespace) -> Iterator[Row]:
    for planner in PLANNERS:
        yield from replans_and_rho(options, planner, THRESHOLDS)


if __name__ == "__main__":
    REUSE.run(arguments(__doc__, layers=10), measure)
