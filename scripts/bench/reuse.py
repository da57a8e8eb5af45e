"""ρ_s in use when plans lag predicted masks by one call, over P_s: on the small trained model, and on slow drift.

    python -m scripts.bench.reuse

Row counts of each series are replayed by the rule that sessions use (`dbsp_core.planning.reuse.replay`): a call
has the plan that was settled by the counts of the calls before it, and of earlier videos. Nothing is timed.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import numpy as np
from matplotlib.figure import Figure

from dbsp_core import BlockMask, Plan, Strategy
from dbsp_core.config import DbspConfig
from dbsp_core.layout.sequence_layout import SequenceLayout
from dbsp_core.planning.plan import plan_from_counts
from dbsp_core.planning.reuse import replay
from scripts.reproduce.common import FIG_11, STRATEGIES, arguments
from scripts.reproduce.fig11 import masks_by_step
from scripts.results.figures import imbalance_axis, legend_below, panels
from scripts.results.result import Result, Row
from scripts.training.trained_model.demo import PREDICTED
from scripts.training.trained_model.small_model import PROMPTS, generate, load_pipeline
from scripts.training.world import Scene

THRESHOLDS = (1.0, 1.01, 1.02, 1.03, 1.05, 1.10)
SETTLED = 2  # calls of a single video after which its worst ρ_s is looked for: the first has no counts before it
VIDEOS = ((50, 4), (8, 10), (4, 10))  # steps, and number of videos one after another, each of another prompt
DRIFT, DRIFT_STEPS = "slow drift, 50 steps", FIG_11["steps"]


def drifting(options: argparse.Namespace) -> Iterator[list[BlockMask]]:
    """Yields masks of Wan2.1 under SpargeAttn by layer, whose drift is fitted to the paper's Fig. 11."""
    for layer in range(options.layers):
        yield masks_by_step(layer, options)


def trained(steps: int, videos: int) -> Iterator[list[BlockMask]]:
    """Yields masks by layer that SpargeAttn's predictor finds in videos of the small trained model, no guidance."""
    pipeline = load_pipeline()
    by_layer: dict[int, list[BlockMask]] = {}
    others = [Scene.draw(0, index).caption for index in range(videos - len(PROMPTS))]
    for seed, prompt in enumerate((*PROMPTS, *others)[:videos]):
        _, watched = generate(pipeline, prompt, seed, steps, PREDICTED, keep=True, guidance=1.0)
        for at in sorted(watched.masks, key=lambda at: at.step):
            by_layer.setdefault(at.layer, []).append(watched.masks[at])
    yield from by_layer.values()


def of_layer(masks: list[BlockMask], steps: int, strategy: str) -> Iterator[dict[str, float]]:
    """Yields numbers for each threshold, with the layout that sessions have for predicted masks."""
    grid, parsed = masks[0].grid, Strategy.parse(strategy)
    layout = SequenceLayout.striped(grid, parsed)

    def make(rows: np.ndarray, _current: Plan | None = None) -> Plan:
        return plan_from_counts(rows, grid, parsed, layout=layout, compare=False)

    counts = [mask.counts.rows for mask in masks]
    first, settled = (steps,) * 2 if len(counts) > steps else (0, SETTLED)
    fresh = float(np.mean([make(rows).rho for rows in counts[first:]]))
    for threshold in THRESHOLDS:
        uses = replay(counts, threshold, make, steps=steps)
        rho = [use.counted.rho for use in uses if use.counted is not None]
        yield {
            "plans": sum(use.new for use in uses),
            "rho": float(np.mean(rho[first:])),
            "rho_worst": max(rho[settled:]),
            "rho_fresh": fresh,
        }


def measure(options: argparse.Namespace) -> Iterator[Row]:
    """Means over layers, but for the worst, for each kind of series, strategy and threshold.

    plans: made by one attention in the whole series, the first included
    rho: ρ_s in use, of several videos from the second on;  rho_worst: the largest, of one video after `SETTLED` calls
    rho_fresh: ρ_s if each call had a plan made from its own counts
    """
    kinds = {DRIFT: (drifting(options), DRIFT_STEPS)}
    for steps, videos in VIDEOS:
        kinds[f"trained model, {videos} videos of {steps} steps"] = trained(steps, videos), steps
    for name, (series, steps) in kinds.items():
        layers = list(series)
        for strategy in STRATEGIES:
            by_threshold = zip(*(of_layer(masks, steps, strategy) for masks in layers), strict=True)
            for threshold, found in zip(THRESHOLDS, by_threshold, strict=True):
                numbers = {
                    key: float((max if "worst" in key else np.mean)([layer[key] for layer in found]))
                    for key in found[0]
                }
                yield Row(series=name, strategy=strategy, threshold=threshold, **numbers, label="counted")


def draw(rows: list[Row]) -> Figure:
    names = list(dict.fromkeys(row.series for row in rows))
    figure, axes = panels(
        "How balanced are plans in use, which lag by one call?",
        f"Mean ρ_s over calls and layers on 8 GPUs, counted; P_s is {DbspConfig().reuse:g} by default",
        columns=2,
        rows=2,
        height=7.2,
    )
    for name, axis in zip(names, [axis for line in axes for axis in line], strict=True):
        for strategy in STRATEGIES:
            here = [row for row in rows if (row.series, row.strategy) == (name, strategy)]
            axis.plot([row.threshold for row in here], [row.rho for row in here], "o-", label=strategy)
        axis.set(title=name, xlabel="threshold P_s: a plan is kept while ρ_s is at most")
        imbalance_axis(axis)
    legend_below(figure, axes[0][0])
    return figure


REUSE = Result("reuse", "ρ_s in use over P_s, plans one call behind", draw)


if __name__ == "__main__":
    REUSE.run(arguments(__doc__, layers=10), measure)
