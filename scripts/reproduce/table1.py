"""Table 1: ρ_s of contiguous Ulysses, Ring and USP before balancing, on synthetic masks, beside the paper's."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from matplotlib import pyplot
from matplotlib.figure import Figure

from scripts.reproduce.common import MEASURED, TABLE_1, PaperRow, arguments, contiguous_rho, mean_and_error, publish


@dataclass(frozen=True)
class Row:
    """rho: mean over layers; standard_error: of that mean; error: rho over the paper's, less one."""

    preset: str
    strategy: str
    paper: float
    rho: float
    standard_error: float
    error: float
    role: str
    label: str
    layers: int


def measure(preset: str, options) -> list[Row]:
    """The preset's rows of Table 1."""
    paper_rows = [row for row in TABLE_1 if row.preset == preset]
    rho = contiguous_rho(preset, [row.strategy for row in paper_rows], options)
    return [_row(row, values) for row, values in zip(paper_rows, rho, strict=True)]


def _row(paper: PaperRow, values: list[float]) -> Row:
    mean, standard_error = mean_and_error(values)
    role = "fitted" if paper.fitted else "held out"
    return Row(
        paper.preset,
        paper.strategy,
        paper.rho,
        mean,
        standard_error,
        mean / paper.rho - 1,
        role,
        MEASURED,
        len(values),
    )


def draw(rows: list[Row]) -> Figure:
    figure, axes = pyplot.subplots(figsize=(10, 4.5), layout="constrained")
    place = np.arange(len(rows))
    axes.bar(place - 0.2, [row.paper for row in rows], 0.4, color="0.75", label="paper, Table 1")
    for role, color in (("fitted", "tab:blue"), ("held out", "tab:orange")):
        here = [i for i, row in enumerate(rows) if row.role == role]
        axes.bar(
            place[here] + 0.2,
            [rows[i].rho for i in here],
            0.4,
            yerr=[rows[i].standard_error for i in here],
            color=color,
            capsize=3,
            label=f"{MEASURED}, {role}",
        )
    axes.set_xticks(place, [f"{row.preset}\n{row.strategy}" for row in rows], rotation=40, ha="right", fontsize=8)
    axes.set(ylim=(1, 1.7), ylabel="ρ_s before balancing", title="Imbalance of contiguous plans on 8 GPUs")
    axes.legend(loc="upper left", fontsize=8)
    return figure


def main() -> None:
    options = arguments(__doc__, layers=0).parse_args()
    rows = [row for preset in dict.fromkeys(row.preset for row in TABLE_1) for row in measure(preset, options)]
    publish("table1", "ρ_s before balancing, 8 GPUs", rows, draw(rows), options.out)


if __name__ == "__main__":
    main()
