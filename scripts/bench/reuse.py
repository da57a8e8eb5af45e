"""ρ_s in use when plans lag predicted masks by one call, over P_s: on the small trained model, and on slow drift.

    python -m scripts.bench.reuse

Row counts of each series are replayed by the rule that sessions use (`dbsp_core.planning.reuse.replay`): a call
has the plan that was settled by the counts of the calls before it, and of earlier videos. Nothing is timed.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
from matplotlib.figure import Figure

from dbsp_core import BlockMask, Plan, Strategy
from dbsp_core.config import DbspConfig
from dbsp_core.layout.sequence_layout import SequenceLayout
from dbsp_core.planning.plan import plan_from_counts
from dbsp_core.planning.reuse import MakePlan, next_use, replay
from scripts.reproduce.common import arguments
from scripts.reproduce.fig11 import masks_by_step
from scripts.results.figures import imbalance_axis, legend_below, panels
from scripts.results.result import Result
from scripts.training.trained_model.demo import PREDICTED
from scripts.training.trained_model.small_model import PROMPTS, generate, load_pipeline
from scripts.training.world import Scene

STRATEGIES = ("U8R1", "U4R2", "U2R4", "U1R8")
THRESHOLDS = (1.0, 1.01, 1.02, 1.03, 1.05, 1.10)
SETTLED = 2
"""Calls of a single video after which its worst ρ_s is looked for: the first has no counts before it."""
VIDEOS = ((50, 4), (8, 10), (4, 10))  # steps, and number of videos one after another, each of another prompt
DRIFT = "slow drift, 50 steps"


@dataclass(frozen=True)
class Row:
    """One series of masks under one strategy and threshold; means over layers.

    Attributes:
        plans: Made by one attention in the whole series, the first included.
        rho: Mean ρ_s in use; rho_worst: the largest of any layer. Of several videos, from the second on; of one,
            rho_worst is looked for after the first `SETTLED` calls.
        rho_last, worst_last: The same if plans were judged by the last call's counts alone (`by_last_call`).
        rho_fresh: Mean ρ_s if each call had a plan made from its own counts.
    """

    series: str
    strategy: str
    threshold: float
    plans: float
    rho: float
    rho_worst: float
    rho_last: float
    worst_last: float
    rho_fresh: float
    label: str = "counted"


@dataclass(frozen=True)
class Series:
    """The masks of one attention after another.

    Attributes:
        steps: Denoising steps of a video; the series may have several videos.
    """

    name: str
    masks: list[BlockMask]
    steps: int


def drifting(options: argparse.Namespace) -> Iterator[Series]:
    """Synthetic masks of Wan2.1 under SpargeAttn, whose drift is fitted to the paper's Fig. 11."""
    for layer in range(options.layers):
        masks = masks_by_step(layer, options)
        yield Series(DRIFT, masks, len(masks))


def trained(steps: int, videos: int, name: str) -> Iterator[Series]:
    """Masks that SpargeAttn's predictor finds in videos of the small trained model, without guidance."""
    pipeline = load_pipeline()
    by_layer: dict[int, list[BlockMask]] = {}
    others = [Scene.draw(0, index).caption for index in range(videos - len(PROMPTS))]
    for seed, prompt in enumerate((*PROMPTS, *others)[:videos]):
        _, watched = generate(pipeline, prompt, seed, steps, PREDICTED, keep=True, guidance=1.0)
        for at in sorted(watched.masks, key=lambda at: at.step):
            by_layer.setdefault(at.layer, []).append(watched.masks[at])
    yield from (Series(name, masks, steps) for masks in by_layer.values())


def measure(series: Series, strategy: str) -> list[Row]:
    """Returns one row per threshold, with the layout that sessions have for predicted masks."""
    grid, parsed = series.masks[0].grid, Strategy.parse(strategy)
    layout = SequenceLayout.striped(grid, parsed)

    def make(rows: np.ndarray, _current: Plan | None = None) -> Plan:
        return plan_from_counts(rows, grid, parsed, layout=layout, compare=False)

    counts = [mask.counts.rows for mask in series.masks]
    videos = len(counts) // series.steps
    first, settled = (series.steps,) * 2 if videos > 1 else (0, SETTLED)
    fresh = float(np.mean([make(rows).rho for rows in counts[first:]]))
    rows_by_threshold = []
    for threshold in THRESHOLDS:
        uses = replay(counts, threshold, make, steps=series.steps)
        rho = [use.counted.rho for use in uses if use.counted is not None]
        rho_last = by_last_call(counts, threshold, make, series.steps)
        rows_by_threshold.append(
            Row(
                series=series.name,
                strategy=strategy,
                threshold=threshold,
                plans=sum(use.new for use in uses),
                rho=float(np.mean(rho[first:])),
                rho_worst=max(rho[settled:]),
                rho_last=float(np.mean(rho_last[first:])),
                worst_last=max(rho_last[settled:]),
                rho_fresh=fresh,
            )
        )
    return rows_by_threshold


def by_last_call(counts: list[np.ndarray], threshold: float, make: MakePlan, steps: int) -> list[float]:
    """Returns ρ_s in use by call if nothing was expected: a plan is kept while the last call's counts are balanced.

    A video begins with the plan that the last video's first call led to.
    """
    rho, plan, first = [], make(counts[0], None), None
    for call, rows in enumerate(counts):
        if first is not None and call % steps == 0:
            plan = first
        elif call > 0:
            plan = next_use(plan.counted(counts[call - 1], compare=False), counts[call - 1], threshold, make).plan
        if call % steps == 1:
            first = plan
        rho.append(plan.counted(rows, compare=False).rho)
    return rho


def over_layers(rows: list[Row]) -> Row:
    """Returns the mean of rows that differ by layer alone, and the worst of their worst."""
    means = {
        name: float(np.mean([getattr(row, name) for row in rows]))
        for name in ("plans", "rho", "rho_last", "rho_fresh")
    }
    worst = {name: max(getattr(row, name) for row in rows) for name in ("rho_worst", "worst_last")}
    return replace(rows[0], **means, **worst)


def all_rows(options: argparse.Namespace) -> list[Row]:
    """Returns a row for each kind of series, strategy and threshold."""
    by_kind: dict[tuple[str, str, float], list[Row]] = {}
    kinds = [drifting(options)]
    kinds += [trained(steps, videos, f"trained model, {videos} videos of {steps} steps") for steps, videos in VIDEOS]
    for series in chain.from_iterable(kinds):
        for strategy in STRATEGIES:
            for row in measure(series, strategy):
                by_kind.setdefault((row.series, strategy, row.threshold), []).append(row)
    return [over_layers(rows) for rows in by_kind.values()]


def draw(rows: list[Row]) -> Figure:
    """Draws ρ_s in use over P_s, one panel per kind of series."""
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


REUSE = Result("reuse", "ρ_s in use over P_s, plans one call behind", Row, draw)


def main() -> None:
    options = arguments(__doc__, layers=10).parse_args()
    REUSE.publish(all_rows(options), options.out)


if __name__ == "__main__":
    main()
