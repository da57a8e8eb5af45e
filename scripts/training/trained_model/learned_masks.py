"""Table 1, Figs. 11 and 12 and more on masks of learned attention: those of the small trained model.

Reads the mask file that ships with the tests; --record makes it again (a minute): a video's masks as SpargeAttn's
predictor gives them, of every layer, head and denoising step, for the branch with the caption.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from dbsp_cli.mask_tools.series import MaskSeries, drift_of
from dbsp_core import BlockMask, Plan, make_plan
from dbsp_core.layout.sequence_layout import SequenceLayout
from dbsp_core.layout.strategy import Strategy
from dbsp_core.masks.mask_writer import save_mask
from dbsp_core.planning.planners import PLANNERS, PaperConfig, PlannerConfig
from dbsp_core.reports.style import INK, layer_colour
from dbsp_core.reports.style import PLANNERS as COLOURS
from dbsp_core.reports.style import STRATEGIES as OF_STRATEGY
from scripts.reproduce.common import STRATEGIES
from scripts.results.figures import grouped_bars, imbalance_axis, legend_below, panels
from scripts.results.result import FOLDER, Result
from scripts.training.trained_model.demo import PREDICTED

FILE = Path(__file__).resolve().parents[3] / "tests" / "data" / "learned-masks.safetensors"
LABEL = "measured on masks of the small trained model"
WAYS = (("contiguous", "contiguous"), ("snake", "contiguous"), ("paper", "contiguous"), ("dbsp", "striped"))
REWARDS = (0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
THRESHOLDS = (1.02, 1.05, 1.10, 1.15, 1.20, 1.30)


@dataclass(frozen=True)
class Balance:
    """ρ_s over all layers and steps. moved: share of all ranks' Q, K and V that changes ring rank."""

    strategy: str
    planner: str
    layout: str
    rho: float
    rho_max: float
    moved: float
    masks: int
    label: str = LABEL


@dataclass(frozen=True)
class Reuse:
    """Over the steps of each layer, Ulysses on 8. replans: plans made, the first included; mean over layers.

    overlap: share of the dense blocks of two neighbouring steps that both have, mean over layers and steps
    """

    planner: str
    threshold: float
    replans: float
    steps: int
    overlap: float
    label: str = LABEL


@dataclass(frozen=True)
class Reward:
    """The paper's planner by its reward R_b, on some masks of every layer."""

    strategy: str
    reward: float
    rho: float
    rho_before: float
    moved: float
    masks: int
    label: str = LABEL


@dataclass(frozen=True)
class Density:
    """One head: its density over steps, least, mean and most."""

    layer: int
    head: int
    density: float
    least: float
    most: float
    label: str = LABEL


def record(path: Path, steps: int) -> None:
    """Writes the mask file. One group of the file is one denoising step."""
    from scripts.training.trained_model.small_model import PROMPTS, generate, load_pipeline

    pipeline = load_pipeline()
    _, watched = generate(pipeline, PROMPTS[0], 0, steps, PREDICTED, keep=True)
    layers = len(pipeline.transformer.blocks)
    masks = {(at.step, at.layer): mask for at, mask in watched.masks.items() if at.cfg_branch == 0}
    groups = ",".join(f"{step}-{step}" for step in range(steps))
    by_step = [[masks[step, layer] for layer in range(layers)] for step in range(steps)]
    path.parent.mkdir(parents=True, exist_ok=True)
    save_mask(path, by_step, groups=groups, packed=True)


def every_mask(series: MaskSeries, every: int = 1) -> Iterator[BlockMask]:
    for step in series.steps[::every]:
        for layer in series.layers:
            yield series.get(step, layer)


def balance(series: MaskSeries, every: int) -> list[Balance]:
    """Table 1 and §4.2: every strategy, without a plan and with one."""
    masks = list(every_mask(series, every))
    rows = []
    for strategy in STRATEGIES:
        for planner, home in WAYS:
            if planner not in PLANNERS:
                continue
            layout = SequenceLayout.named(home, masks[0].grid, Strategy.parse(strategy))
            plans = [make_plan(mask, strategy, planner, layout=layout) for mask in masks]
            rows.append(Balance(strategy, planner, home, *_means(plans), len(masks)))
    return rows


def _means(plans: list[Plan]) -> tuple[float, float, float]:
    rho = [plan.rho for plan in plans]
    return float(np.mean(rho)), max(rho), float(np.mean([plan.moved for plan in plans]))


def reuse(series: MaskSeries) -> list[Reuse]:
    """Fig. 11: how often plans are made when they are kept up to a threshold."""
    rows = []
    for planner in ("paper", "dbsp"):
        for threshold in THRESHOLDS:
            drifts = [drift_of(series, layer, "U8R1", planner, threshold) for layer in series.layers]
            replans = float(np.mean([drift.replans for drift in drifts]))
            overlap = float(np.mean([value for drift in drifts for value in drift.iou]))
            rows.append(Reuse(planner, threshold, replans, len(series.steps), overlap))
    return rows


def rewards(series: MaskSeries, every: int) -> list[Reward]:
    """Fig. 12: what the paper's reward buys and costs."""
    masks = list(every_mask(series, every))
    rows = []
    for strategy in ("U1R8", "U2R4", "U4R2"):
        for value in REWARDS:
            planner = PlannerConfig("paper", paper=PaperConfig(value))
            plans = [make_plan(mask, strategy, planner) for mask in masks]
            before = float(np.mean([plan.rho_before for plan in plans]))
            rho, _, moved = _means(plans)
            rows.append(Reward(strategy, value, rho, before, moved, len(masks)))
    return rows


def densities(series: MaskSeries) -> list[Density]:
    rows = []
    for layer in series.layers:
        values = np.array([series.get(step, layer).bits.float().mean((1, 2)).numpy() for step in series.steps])
        rows += [
            Density(layer, head, float(one.mean()), float(one.min()), float(one.max()))
            for head, one in enumerate(values.T)
        ]
    return rows


def draw_balance(rows: list[Balance]) -> Figure:
    figure, axes = panels(
        "How even do planners make masks of learned attention?", f"8 GPUs, –: the worst mask; {LABEL}", height=4.4
    )
    (axis,) = axes[0]
    ways = list(dict.fromkeys((row.planner, row.layout) for row in rows))
    names = {way: f"{way[0]}, {way[1]} layout" for way in ways}
    of = {((row.planner, row.layout), row.strategy): row for row in rows}
    series = {names[way]: [of[way, one].rho for one in STRATEGIES] for way in ways}
    worst = {names[way]: [of[way, one].rho_max for one in STRATEGIES] for way in ways}
    colours = {names[way]: COLOURS[way[0]] for way in ways}
    grouped_bars(axis, STRATEGIES, series, colours, base=1.0, worst=worst, number="%.3f")
    imbalance_axis(axis)
    legend_below(figure, axis, columns=2)
    return figure


def draw_reuse(rows: list[Reuse]) -> Figure:
    figure, axes = panels(
        f"How many plans do {rows[0].steps} denoising steps need?", f"U8R1, threshold alone; {LABEL}", height=4.0
    )
    (axis,) = axes[0]
    for planner in dict.fromkeys(row.planner for row in rows):
        here = [row for row in rows if row.planner == planner]
        thresholds, plans = [row.threshold for row in here], [row.replans for row in here]
        axis.plot(thresholds, plans, "o-", color=COLOURS[planner], label=f"planner {planner}")
    axis.set(xlabel="threshold P_s: a plan is kept while ρ_s is at most this", ylabel="plans made", ylim=(0, None))
    legend_below(figure, axis)
    return figure


def draw_rewards(rows: list[Reward]) -> Figure:
    figure, axes = panels(
        "Paper's planner on learned attention: what does its reward R_b trade?", f"8 GPUs, {LABEL}", columns=2
    )
    left, right = axes[0]
    for strategy in dict.fromkeys(row.strategy for row in rows):
        here, colour = [row for row in rows if row.strategy == strategy], OF_STRATEGY[strategy]
        left.plot([row.reward for row in here], [row.rho for row in here], "o-", color=colour, label=strategy)
        left.axhline(here[0].rho_before, color=colour, linestyle=":", linewidth=1.5)
        right.plot([row.reward for row in here], [100 * row.moved for row in here], "o-", color=colour)
    left.plot([], [], ":", color=INK, linewidth=1.5, label="before balancing")
    left.set(xlabel="reward R_b: blocks held where they are", title="More reward, less even")
    imbalance_axis(left)
    right.set(xlabel="reward R_b", ylabel="Q, K and V moved, %", ylim=(0, None), title="More reward, fewer bytes")
    legend_below(figure, left)
    return figure


def draw_densities(rows: list[Density]) -> Figure:
    figure, axes = panels(
        "How unlike are the heads of learned attention?", f"Thin lines: least and most over steps; {LABEL}", height=4.0
    )
    (axis,) = axes[0]
    heads = 1 + max(row.head for row in rows)
    place = np.array([row.layer * (heads + 2) + row.head for row in rows])
    means = np.array([row.density for row in rows])
    reach = np.array([[row.density - row.least for row in rows], [row.most - row.density for row in rows]]).clip(min=0)
    axis.bar(place, means, 0.85, color=[layer_colour(row.layer) for row in rows])
    axis.errorbar(place, means, reach, fmt="none", ecolor=INK, elinewidth=1)
    layers = sorted({row.layer for row in rows})
    middles = [layer * (heads + 2) + (heads - 1) / 2 for layer in layers]
    axis.set_xticks(middles, [f"layer {layer}, heads 0 to {heads - 1}" for layer in layers], fontsize=10)
    axis.set(ylabel="density: share of blocks computed", ylim=(0, None))
    axis.grid(axis="x", visible=False)
    return figure


BALANCE = Result("learned-balance", "ρ_s before and after balancing, 8 GPUs (Table 1, §4.2)", Balance, draw_balance)
REUSE = Result("learned-reuse", "P_s against plans made (Fig. 11)", Reuse, draw_reuse)
REWARD = Result("learned-reward", "R_b against ρ_s and share moved (Fig. 12)", Reward, draw_rewards)
DENSITY = Result("learned-density", "Density of every head", Density, draw_densities)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--masks", type=Path, default=FILE, help="mask file with a group for every step")
    parser.add_argument("--record", action="store_true", help="make the mask file first")
    parser.add_argument("--steps", type=int, default=12, help="denoising steps to record")
    parser.add_argument("--every", type=int, default=1, help="take only each n-th step, but for reuse")
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder for the CSVs and the PNGs")
    options = parser.parse_args()
    if options.record:
        record(options.masks, options.steps)
    series = MaskSeries.read(options.masks)
    DENSITY.publish(densities(series), options.out)
    BALANCE.publish(balance(series, options.every), options.out)
    REUSE.publish(reuse(series), options.out)
    REWARD.publish(rewards(series, 5 * options.every), options.out)


if __name__ == "__main__":
    main()
