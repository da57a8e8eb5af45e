"""§4.2: ρ_s after balancing, for every planner and strategy on 8 GPUs, on synthetic masks, next to the paper's.

Others run on rings, whose ranks wait for one another in every ring step (Eq. 1); db-SP's ranks in none.
"""

from __future__ import annotations

import argparse
import itertools
from dataclasses import dataclass

import numpy as np
from matplotlib.figure import Figure

from dbsp_core import Plan, Strategy, make_plan
from dbsp_core.layout.sequence_layout import LAYOUTS, SequenceLayout
from dbsp_core.planning.planners import PLANNERS, rho_bound
from dbsp_core.reports.style import INK
from dbsp_core.sources.synthetic.source import PRESETS
from scripts.reproduce.common import BALANCED, MEASURED, STRATEGIES, arguments, masks
from scripts.reproduce.lockstep import RingPlan, plan_ring, rho_before
from scripts.results.colours import PLANNERS as COLOURS
from scripts.results.figures import ON_WHITE, in_words, panels
from scripts.results.result import Result


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
    """Every planner and strategy on the same masks."""
    layers = list(masks(preset, options))
    plans: dict[tuple[str, str, str], list[Plan | RingPlan]] = {}
    before = {strategy: [rho_before(mask, strategy) for mask in layers] for strategy in STRATEGIES}
    bound = {name: [rho_bound(mask.counts.rows, Strategy.parse(name).world) for mask in layers] for name in STRATEGIES}
    for strategy, way in itertools.product(STRATEGIES, options.ways):
        planner, layout = way.split("@")
        parsed = Strategy.parse(strategy)
        tokens_at = SequenceLayout.named(layout, layers[0].grid, parsed)
        if planner == "dbsp":
            made = [make_plan(mask, parsed, layout=tokens_at, compare=False) for mask in layers]
        else:
            made = [plan_ring(mask, parsed, planner, tokens_at, options.reward) for mask in layers]
        plans[strategy, planner, layout] = made
    return [_row(preset, *key, here, before[key[0]], bound[key[0]]) for key, here in plans.items()]


def _row(
    preset: str,
    strategy: str,
    planner: str,
    layout: str,
    plans: list[Plan | RingPlan],
    before: list[float],
    bound: list[float],
) -> Row:
    return Row(
        preset,
        strategy,
        planner,
        layout,
        rho=float(np.mean([plan.rho for plan in plans])),
        rho_max=max(plan.rho for plan in plans),
        rho_before=float(np.mean(before)),
        bound=float(np.mean(bound)),
        moved=float(np.mean([plan.moved for plan in plans])),
        paper=BALANCED[strategy][0],
        slides=BALANCED[strategy][1],
        label=MEASURED,
        layers=len(plans),
    )


LIMITS = {"U8R1": 1.1, "U1R8": 1.05}
"""§4.2, of ρ_s after balancing."""


def draw(rows: list[Row]) -> Figure:
    presets = list(dict.fromkeys(row.preset for row in rows))
    ways = sorted(
        dict.fromkeys((row.planner, row.layout) for row in rows),
        key=lambda way: -np.mean([row.rho for row in rows if (row.planner, row.layout) == way]),
    )
    figure, axes = panels(
        "Which planner makes 8 GPUs equally busy?",
        f"Dots: mean imbalance ρ_s, 1 is even; lines end at the worst layer; {MEASURED}\n"
        "In brackets: the sequence layout, where it is not the contiguous one; dashed: the paper's limit (§4.2)",
        len(presets),
        len(STRATEGIES),
        1.6 + len(presets) * (0.6 + 0.27 * len(ways)),
        sharex=True,
        sharey=True,
    )
    most = max(row.rho_max for row in rows)
    for line, preset in zip(axes, presets, strict=True):
        for axis, strategy in zip(line, STRATEGIES, strict=True):
            for height, way in enumerate(ways):
                for row in rows:
                    if (row.preset, row.strategy, row.planner, row.layout) == (preset, strategy, *way):
                        axis.plot([row.rho, row.rho_max], [height] * 2, color=COLOURS[row.planner], linewidth=3)
                        axis.plot(row.rho, height, "o", color=COLOURS[row.planner], markersize=7)
                        axis.text(row.rho_max + 0.03, height, f"{row.rho:.3f}", va="center", size=9.5, bbox=ON_WHITE)
            if strategy in LIMITS:
                axis.axvline(LIMITS[strategy], color=INK, linestyle="--", linewidth=1, zorder=0.5)
            axis.set(title=strategy, xlim=(0.97, most + 0.17), ylim=(len(ways) - 0.4, -0.6))
            axis.set_xticks([1, 1.2, 1.4] if most > 1.3 else [1, 1.1, 1.2])
        names = [planner + ("" if layout == "contiguous" else f" ({layout})") for planner, layout in ways]
        line[0].set_yticks(range(len(ways)), names)
        line[0].set_ylabel(in_words(preset), weight="bold")
    return figure


BALANCE = Result("balanced", "ρ_s after balancing, 8 GPUs", Row, draw)


def main() -> None:
    parser = arguments(__doc__, layers=3)
    choices = [f"{planner}@{layout}" for planner in PLANNERS for layout in LAYOUTS]
    default = [f"{planner}@contiguous" for planner in PLANNERS] + [
        "contiguous@striped",
        "dbsp@striped",
    ]
    parser.add_argument("--ways", nargs="+", choices=choices, default=default, help="PLANNER@LAYOUT to compare")
    parser.add_argument("--presets", nargs="+", choices=PRESETS, default=["wan2.1-t2v-14b", "cogvideox1.5-5b"])
    parser.add_argument("--reward", type=float, default=1.0, help="R_b of planner paper")
    options = parser.parse_args()
    rows = [row for preset in options.presets for row in measure(preset, options)]
    BALANCE.publish(rows, options.out)


if __name__ == "__main__":
    main()
