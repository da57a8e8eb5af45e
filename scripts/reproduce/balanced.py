#!/usr/bin/env python3
"""§4.2: ρ_s after balancing, for every planner and strategy on 8 GPUs, on synthetic masks, beside the paper's."""

from __future__ import annotations

import argparse
import itertools
from dataclasses import dataclass

import numpy as np
from matplotlib import pyplot
from matplotlib.figure import Figure

from common import BALANCED, MEASURED, STRATEGIES, arguments, masks, publish
from dbsp_core import Plan, Strategy, make_plan
from dbsp_core.layout.learned import MaskProfile
from dbsp_core.layout.sequence_layout import LAYOUT_ORDERS, SequenceLayout
from dbsp_core.planning.planners import PLANNERS, PaperConfig, PlannerConfig
from dbsp_core.sources.synthetic.presets import PRESETS
from scripts.reproduce.burst import BurstBalance, burst_balance

BURST = "burst"
"""BurstEngine's balancing, counted and not planned."""


@dataclass(frozen=True)
class Row:
    """Means over layers, but for rho_max. moved: share of all ranks' Q, K and V that changes ring rank."""

    preset: str
    strategy: str
    planner: str
    layout: str
    rho: float
    rho_max: float
    rho_before: float
    bound: float
    moved: float
    paper: str
    slides: str
    label: str
    layers: int


def measure(preset: str, options: argparse.Namespace) -> list[Row]:
    """Every planner and strategy on the same masks; layout "learned" learns from the layers that are measured."""
    layers = list(masks(preset, options))
    profile = MaskProfile.of(layers)
    plans: dict[tuple[str, str, str], list[Plan] | list[BurstBalance]] = {}
    paper = PaperConfig(reward=options.reward)
    for strategy, way in itertools.product(STRATEGIES, options.ways):
        planner, home = way.split("@")
        parsed = Strategy.parse(strategy)
        layout = SequenceLayout.named(home, layers[0].grid, parsed, profile=profile)
        if planner == BURST:
            plans[strategy, planner, home] = [burst_balance(mask, parsed, layout) for mask in layers]
        else:
            config = PlannerConfig(planner, paper=paper)
            plans[strategy, planner, home] = [make_plan(mask, parsed, config, layout=layout) for mask in layers]
    return [_row(preset, *key, here) for key, here in plans.items()]


def _row(preset: str, strategy: str, planner: str, layout: str, plans: list[Plan] | list[BurstBalance]) -> Row:
    return Row(
        preset,
        strategy,
        planner,
        layout,
        rho=float(np.mean([plan.rho for plan in plans])),
        rho_max=max(plan.rho for plan in plans),
        rho_before=float(np.mean([plan.rho_before for plan in plans])),
        bound=float(np.mean([plan.rho_bound for plan in plans])),
        moved=float(np.mean([plan.moved for plan in plans])),
        paper=BALANCED[strategy][0],
        slides=BALANCED[strategy][1],
        label=MEASURED,
        layers=len(plans),
    )


def draw(rows: list[Row]) -> Figure:
    presets = list(dict.fromkeys(row.preset for row in rows))
    ways = list(dict.fromkeys((row.planner, row.layout) for row in rows))
    figure, panels = pyplot.subplots(
        1, len(presets), figsize=(5.5 * len(presets), 4.2), squeeze=False, sharey=True, layout="constrained"
    )
    width = 0.8 / len(ways)
    for axes, preset in zip(panels[0], presets, strict=True):
        for number, (planner, home) in enumerate(ways):
            here = [row for row in rows if (row.preset, row.planner, row.layout) == (preset, planner, home)]
            place = np.arange(len(here)) + (number - (len(ways) - 1) / 2) * width
            name = planner if home == "contiguous" else f"{planner}, {home} home"
            axes.bar(place, [row.rho - 1 for row in here], width, bottom=1, label=name)
            axes.scatter(place, [row.rho_max for row in here], marker="_", color="k", s=40)
        axes.set_xticks(range(len(STRATEGIES)), STRATEGIES)
        for strategy, limit in (("U8R1", 1.1), ("U1R8", 1.05)):
            middle = STRATEGIES.index(strategy)
            axes.hlines(limit, middle - 0.45, middle + 0.45, color="r", linestyle="--")
        axes.set_title(preset)
    panels[0][0].set_ylabel("ρ_s (bars: mean, –: worst layer)")
    panels[0][-1].plot([], [], "r--", label="paper's limit, §4.2")
    handles, labels = panels[0][-1].get_legend_handles_labels()
    figure.legend(handles, labels, fontsize=8, ncols=5, loc="outside lower center")
    figure.suptitle(f"ρ_s by planner, 8 GPUs, {MEASURED}")
    return figure


def main() -> None:
    parser = arguments(__doc__, layers=3)
    choices = [f"{planner}@{home}" for planner in (*PLANNERS, BURST) for home in LAYOUT_ORDERS]
    default = [f"{planner}@contiguous" for planner in PLANNERS] + [
        "contiguous@striped",
        "dbsp@striped",
        "dbsp@learned",
    ]
    parser.add_argument("--ways", nargs="+", choices=choices, default=default, help="PLANNER@HOME to compare")
    parser.add_argument("--presets", nargs="+", choices=PRESETS, default=["wan2.1-t2v-14b", "cogvideox1.5-5b"])
    parser.add_argument("--reward", type=float, default=1.0, help="R_b of planner paper")
    options = parser.parse_args()
    rows = [row for preset in options.presets for row in measure(preset, options)]
    publish("balanced", "ρ_s after balancing, 8 GPUs", rows, draw(rows), options.out)


if __name__ == "__main__":
    main()
