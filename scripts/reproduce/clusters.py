"""The paper's two servers (§6), modelled: speed-up of planner dbsp over plain Ulysses and Ring, on a800 and h800."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dbsp_core.cost.machine import load_hardware
from dbsp_core.reports.style import INK
from scripts.reproduce.authors.fit import in_scripts
from scripts.reproduce.authors.measured import DBSP
from scripts.reproduce.authors.runs import as_run
from scripts.reproduce.modelled import MODELLED, PAPER_ATTENTION, PAPER_END_TO_END, model_masks, modelled_arguments
from scripts.reproduce.simulate import simulate
from scripts.results.colours import PLANNERS, ROLES
from scripts.results.figures import in_words, legend_below, panels
from scripts.results.result import Result


@dataclass(frozen=True)
class Row:
    """theirs: as the paper's text has it;  least, most: modelled, over what the figure ranges over"""

    paper: str
    figure: str
    cluster: str
    theirs: str
    least: float
    most: float
    assumed: str
    label: str = MODELLED


def measure(options: argparse.Namespace) -> Iterator[Row]:
    for name in ("a800", "h800"):
        for (preset, gpus), (low, high) in PAPER_END_TO_END.items():
            masks = model_masks(preset, options)
            hardware = in_scripts(load_hardware(name).with_kernel("sparge"), DBSP, preset)
            rows = simulate(as_run(preset), masks, hardware, [gpus], ["contiguous", "dbsp"])
            ours = [row for row in rows if row.planner == "dbsp"]
            whole, mean = [row.speedup for row in ours], "theirs: least and largest mean, machines together"
            yield Row(
                "db-SP §6.2",
                f"{preset}, end to end",
                f"{gpus} × {name}",
                f"{low}–{high}",
                min(whole),
                max(whole),
                mean,
            )
            for strategy, theirs in ((s, value) for (s, n), value in PAPER_ATTENTION.items() if n == gpus):
                (one,) = (row.attention_speedup for row in ours if row.strategy == strategy)
                what = f"{preset}, attention over {strategy}"
                yield Row(
                    "db-SP §6.2", what, f"{gpus} × {name}", str(theirs), one, one, "mean over models and machines"
                )


MACHINES = {"a800": ("o", PLANNERS["dbsp"]), "h800": ("D", ROLES["held out"])}


def draw(rows: list[Row]) -> Figure:
    """A line for each figure: the paper's range, and the model's on each of its machines."""
    figure, axes = panels(
        "How do modelled gains compare with those that the paper measured?",
        f"Thick: measured by the paper, over what the figure ranges over; markers: {rows[0].label}",
        height=4.9,
    )
    _compare(axes[0, 0], rows)
    axes[0, 0].set_title("db-SP over plain plans: balance alone gives less")
    axes[0, 0].set_xlabel("times as fast (1: no gain)")
    legend_below(figure, axes.flat)
    return figure


def _compare(axis: Axes, rows: list[Row]) -> None:
    lines = list(dict.fromkeys(_line(row) for row in rows))
    for row in rows:
        height = lines.index(_line(row))
        theirs = [float(part) for part in row.theirs.split("–")]
        axis.plot([theirs[0], theirs[-1]], [height] * 2, color=ROLES["measured"], linewidth=7, solid_capstyle="butt")
        if theirs[0] == theirs[-1]:
            axis.plot(theirs[0], height, "|", color=ROLES["measured"], markersize=12, markeredgewidth=4)
        machine = next(name for name in MACHINES if name in row.cluster)
        marker, colour = MACHINES[machine]
        low = height + (0.27 if machine == "h800" else -0.27)
        axis.plot([row.least, row.most], [low] * 2, marker=marker, color=colour, markersize=5, linewidth=2)
    axis.plot([], [], color=ROLES["measured"], linewidth=7, label="measured by the paper")
    for machine, (marker, colour) in MACHINES.items():
        if any(machine in row.cluster for row in rows):
            axis.plot([], [], marker=marker, color=colour, markersize=5, label=f"modelled, {machine.upper()}")
    axis.axvline(1, color=INK, linewidth=1)
    axis.set_yticks(range(len(lines)), lines)
    axis.set_ylim(len(lines) - 0.4, -0.6)


def _line(row: Row) -> str:
    model, _, figure = row.figure.partition(", ")
    return f"{in_words(model)}, {row.cluster[0]} GPUs, {figure}"


CLUSTERS = Result("clusters", "The paper's clusters", Row, draw)


def main() -> None:
    parser = modelled_arguments(__doc__, layers=0)
    parser.set_defaults(coarsen=4)
    options = parser.parse_args()
    CLUSTERS.publish(list(measure(options)), options.out)


if __name__ == "__main__":
    main()
