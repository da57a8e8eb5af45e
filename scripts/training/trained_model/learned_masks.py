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
from matplotlib import pyplot
from matplotlib.figure import Figure

from dbsp_cli.mask_tools.series import MaskSeries, drift_of
from dbsp_core import BlockMask, Plan, make_plan
from dbsp_core.layout.sequence_layout import SequenceLayout
from dbsp_core.layout.strategy import Strategy
from dbsp_core.masks.mask_writer import save_mask
from dbsp_core.planning.planners import PLANNERS, PaperConfig, PlannerConfig
from dbsp_core.runtime.session.replan_rule import ReplanRule
from scripts.reproduce.common import RESULTS, STRATEGIES, publish
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
            drifts = [drift_of(series, layer, "U8R1", planner, ReplanRule(threshold)) for layer in series.layers]
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
    figure, axes = pyplot.subplots(figsize=(8, 4), layout="constrained")
    ways = list(dict.fromkeys((row.planner, row.layout) for row in rows))
    width = 0.8 / len(ways)
    for number, (planner, home) in enumerate(ways):
        here = [row for row in rows if (row.planner, row.layout) == (planner, home)]
        place = [STRATEGIES.index(row.strategy) + (number - (len(ways) - 1) / 2) * width for row in here]
        axes.bar(place, [row.rho - 1 for row in here], width, bottom=1, label=f"{planner}, {home} home")
        axes.scatter(place, [row.rho_max for row in here], marker="_", color="k")
    axes.set_xticks(range(len(STRATEGIES)), STRATEGIES)
    axes.set(ylabel="ρ_s (bars: mean, –: worst mask)", title=f"8 GPUs, {LABEL}")
    axes.legend(fontsize=8)
    return figure


def draw_reuse(rows: list[Reuse]) -> Figure:
    figure, axes = pyplot.subplots(figsize=(6, 4), layout="constrained")
    for planner in dict.fromkeys(row.planner for row in rows):
        here = [row for row in rows if row.planner == planner]
        axes.plot([row.threshold for row in here], [row.replans for row in here], "o-", label=f"planner {planner}")
    axes.set(xlabel="threshold P_s", ylabel=f"plans made in {rows[0].steps} steps", title=f"U8R1, {LABEL}")
    axes.set_ylim(0, None)
    axes.legend(fontsize=8)
    return figure


def draw_rewards(rows: list[Reward]) -> Figure:
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for strategy in dict.fromkeys(row.strategy for row in rows):
        here = [row for row in rows if row.strategy == strategy]
        (line,) = left.plot([row.reward for row in here], [row.rho for row in here], "o-", label=strategy)
        left.axhline(here[0].rho_before, color=line.get_color(), linestyle=":")
        right.plot([row.reward for row in here], [row.moved for row in here], "o-", label=strategy)
    left.set(xlabel="reward R_b", ylabel="ρ_s (dotted: before)")
    right.set(xlabel="reward R_b", ylabel="share of Q, K and V moved", ylim=(0, None))
    left.legend(fontsize=8)
    figure.suptitle(f"Planner paper, {LABEL}")
    return figure


def draw_densities(rows: list[Density]) -> Figure:
    figure, axes = pyplot.subplots(figsize=(9, 3.8), layout="constrained")
    heads = 1 + max(row.head for row in rows)
    place = np.array([row.layer * (heads + 2) + row.head for row in rows])
    means = np.array([row.density for row in rows])
    reach = np.array([[row.density - row.least for row in rows], [row.most - row.density for row in rows]]).clip(min=0)
    axes.bar(place, means, color=[f"C{row.layer}" for row in rows])
    axes.errorbar(place, means, reach, fmt="none", ecolor="k", linewidth=0.8)
    layers = sorted({row.layer for row in rows})
    axes.set_xticks([layer * (heads + 2) + heads / 2 for layer in layers], [f"layer {layer}" for layer in layers])
    axes.set(ylabel="density by head (lines: over steps)", title=LABEL)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--masks", type=Path, default=FILE, help="mask file with a group for every step")
    parser.add_argument("--record", action="store_true", help="make the mask file first")
    parser.add_argument("--steps", type=int, default=12, help="denoising steps to record")
    parser.add_argument("--every", type=int, default=1, help="take only each n-th step, but for reuse")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the CSVs and the PNGs")
    options = parser.parse_args()
    if options.record:
        record(options.masks, options.steps)
    series = MaskSeries.read(options.masks)
    rows = densities(series)
    publish("learned-density", "Density of every head", rows, draw_densities(rows), options.out)
    table = balance(series, options.every)
    publish(
        "learned-balance",
        "ρ_s before and after balancing, 8 GPUs (Table 1, §4.2)",
        table,
        draw_balance(table),
        options.out,
    )
    kept = reuse(series)
    publish("learned-reuse", "P_s against plans made (Fig. 11)", kept, draw_reuse(kept), options.out)
    bought = rewards(series, 5 * options.every)
    publish("learned-reward", "R_b against ρ_s and share moved (Fig. 12)", bought, draw_rewards(bought), options.out)


if __name__ == "__main__":
    main()
