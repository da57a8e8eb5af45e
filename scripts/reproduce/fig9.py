"""Fig. 9: attention speed-up over the ratio of ρ_s before to after balancing, the authors' points and the model's.

Masks differ in how imbalanced heads are (Ulysses) or rows and columns (Ring); all else is the preset's. What a ring
reaches is less than ρ_s promises for two reasons that the model has: ρ_s counts the slowest rank of every ring step,
while ranks run ahead of one another; and a ring's launches and merges do not shrink with blocks. The authors' program
times neither reordering nor exchange. "reached" is the share of the promised gain: (speed-up − 1) over (ratio − 1),
summed over points.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import numpy as np
from matplotlib.figure import Figure

from dbsp_core import Strategy
from dbsp_core.reports.style import INK
from scripts.reproduce.authors.measured import speedups
from scripts.reproduce.authors.runs import as_run
from scripts.reproduce.common import masks
from scripts.reproduce.modelled import machine, modelled_arguments, modelled_video
from scripts.results.colours import PLANNERS as COLOURS
from scripts.results.colours import ROLES
from scripts.results.figures import in_words, legend_below, panels
from scripts.results.result import Result, Row

MODEL = "wan2.1-t2v-14b"
LEVELS = {
    "U8R1": ("head_concentration", (40.0, 12.0, 6.0, 3.0, 1.5)),
    "U1R8": ("spread", (0.1, 0.25, 0.4, 0.6, 0.9)),
}
AUTHORS, PLANNERS = "authors", ("paper", "dbsp")


def measure(options: argparse.Namespace) -> Iterator[Row]:
    model, hardware = as_run(MODEL), machine(options)
    for name, (key, values) in LEVELS.items():
        for ratio, speedup in speedups(name).tolist():
            point = {"strategy": name, "by": AUTHORS, "varied": "", "rho_ratio": ratio, "attention_speedup": speedup}
            yield Row(**point, label="measured by the paper's authors")
        for value in values:
            layers, strategy = list(masks(MODEL, options, **{key: value})), Strategy.parse(name)
            base = modelled_video(strategy, "contiguous", layers, model, hardware)
            for planner in PLANNERS:
                balanced = modelled_video(strategy, planner, layers, model, hardware)
                yield Row(
                    strategy=name,
                    by=planner,
                    varied=f"{key}={value:g}",
                    rho_ratio=base.rho / balanced.rho,
                    attention_speedup=base.attention_s / balanced.attention_s,
                    label=f"modelled, synthetic masks, {hardware.name}",
                )


def reached(rows: list[Row], strategy: str, by: str) -> float:
    points = [row for row in rows if (row.strategy, row.by) == (strategy, by)]
    return sum(row.attention_speedup - 1 for row in points) / sum(row.rho_ratio - 1 for row in points)


def shares(rows: list[Row], strategy: str) -> str:
    return ", ".join(f"{by} {reached(rows, strategy, by):.2f}" for by in (AUTHORS, *PLANNERS))


def draw(rows: list[Row]) -> Figure:
    figure, axes = panels(
        "How much of the gain in ρ_s does attention gain?",
        f"{in_words(MODEL)}, 8 GPUs; the authors measured, planners are modelled on synthetic masks",
        columns=2,
        height=4.8,
        sharey=True,
    )
    for axis, name in zip(axes[0], LEVELS, strict=True):
        for by, style, colour in (
            (AUTHORS, ".", ROLES["measured"]),
            ("paper", "s--", COLOURS["paper"]),
            ("dbsp", "o-", COLOURS["dbsp"]),
        ):
            here = sorted((row for row in rows if (row.strategy, row.by) == (name, by)), key=lambda row: row.rho_ratio)
            ratios, gains = [row.rho_ratio for row in here], [row.attention_speedup for row in here]
            label = "measured by the authors" if by == AUTHORS else f"planner {by}, modelled"
            axis.plot(ratios, gains, style, color=colour, label=label)
        line = np.array([1, max(row.rho_ratio for row in rows if row.strategy == name)])
        axis.plot(line, line, ":", color=INK, linewidth=1, label="all of it")
        axis.set(xlabel="ρ_s before over ρ_s after balancing", title=f"{name}: {shares(rows, name)}")
    axes[0, 0].set_ylabel("attention's speed-up")
    legend_below(figure, axes[0, 0])
    return figure


GAINS = Result("fig9", "Attention speed-up against ρ_s, 8 GPUs", draw)


if __name__ == "__main__":
    parser = modelled_arguments(__doc__, layers=0)
    parser.set_defaults(kernel="auto", coarsen=4)  # in 16 bits, as Fig. 10's times are
    words = "share of the gain in ρ_s that attention gained"
    GAINS.run(parser, measure, lambda rows: [f"{name}, {words}: {shares(rows, name)}" for name in LEVELS])
