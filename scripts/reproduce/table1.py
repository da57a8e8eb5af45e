"""Table 1: ρ_s of contiguous Ulysses, Ring and USP before balancing, on synthetic masks, and the paper's."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import numpy as np
from matplotlib.figure import Figure

from scripts.reproduce.common import MEASURED, TABLE_1, arguments, masks
from scripts.reproduce.lockstep import RingPlan, plan_ring
from scripts.results.colours import ROLES
from scripts.results.figures import grouped_bars, imbalance_axis, in_words, legend_below, panels
from scripts.results.result import Result, Row


def measure(options: argparse.Namespace) -> Iterator[Row]:
    for preset in dict.fromkeys(row.preset for row in TABLE_1):
        paper_rows = [row for row in TABLE_1 if row.preset == preset]
        # 1. One contiguous plan for all layers, as it looks at no mask.
        plans: dict[str, RingPlan] = {}
        rho: dict[str, list[float]] = {row.strategy: [] for row in paper_rows}
        for mask in masks(preset, options):
            for strategy, values in rho.items():
                if strategy not in plans:
                    plans[strategy] = plan_ring(mask, strategy)
                values.append(plans[strategy].evaluate(mask).rho)
        # 2. The mean over layers, and its standard error.
        for row in paper_rows:
            values = rho[row.strategy]
            mean, count = float(np.mean(values)), len(values)
            error = float(np.std(values, ddof=1) / np.sqrt(count)) if count > 1 else 0.0
            role = "fitted" if row.fitted else "held out"
            yield Row(
                preset=preset,
                strategy=row.strategy,
                paper=row.rho,
                rho=mean,
                standard_error=error,
                error=mean / row.rho - 1,
                role=role,
                label=MEASURED,
                layers=count,
            )


def draw(rows: list[Row]) -> Figure:
    figure, axes = panels(
        "How imbalanced is sequence parallelism that doesn't look at masks?",
        f"Contiguous plans on 8 GPUs, {MEASURED}; error bars: standard error over layers",
        columns=2,
        height=4.2,
        width_ratios=(1.35, 1),
        sharey=True,
    )
    nan = float("nan")
    for axis, model in zip(axes[0], ("wan2.1-t2v-14b", "cogvideox1.5-5b"), strict=True):
        here = sorted(
            (row for row in rows if row.preset.startswith(model)), key=lambda row: (row.preset, -int(row.strategy[1]))
        )
        series = {"paper, Table 1": [row.paper for row in here]}
        errors = {"paper, Table 1": [0.0] * len(here)}
        for role in ("fitted", "held out"):
            mine = [row.role == role for row in here]
            label = {"fitted": "here, masks fitted to it", "held out": "here, held out"}[role]
            series[label] = [row.rho if own else nan for row, own in zip(here, mine, strict=True)]
            errors[label] = [row.standard_error if own else nan for row, own in zip(here, mine, strict=True)]
        names = [row.strategy + ("\nSpargeAttn" if row.preset.endswith("-sparge") else "") for row in here]
        grouped_bars(axis, names, series, list(ROLES.values()), base=1.0, errors=errors)
        axis.set_title(in_words(model))
    imbalance_axis(axes[0, 0], 1.6)
    axes[0, 1].set_ylabel("")
    legend_below(figure, axes.flat)
    return figure


TABLE = Result("table1", "ρ_s before balancing, 8 GPUs", draw)


if __name__ == "__main__":
    TABLE.run(arguments(__doc__, layers=0), measure)
