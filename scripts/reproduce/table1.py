"""Table 1: ρ_s of contiguous Ulysses, Ring and USP before balancing, on synthetic masks, and the paper's."""

from __future__ import annotations

from dataclasses import dataclass

from matplotlib.figure import Figure

from scripts.reproduce.common import MEASURED, TABLE_1, PaperRow, arguments, contiguous_rho, mean_and_error
from scripts.results.colours import ROLES
from scripts.results.figures import grouped_bars, imbalance_axis, in_words, legend_below, panels
from scripts.results.result import Result


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
        here = sorted((row for row in rows if row.preset.startswith(model)), key=_order)
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


def _order(row: Row) -> tuple[str, int]:
    return row.preset, -int(row.strategy[1])


TABLE = Result("table1", "ρ_s before balancing, 8 GPUs", Row, draw)


def main() -> None:
    options = arguments(__doc__, layers=0).parse_args()
    rows = [row for preset in dict.fromkeys(row.preset for row in TABLE_1) for row in measure(preset, options)]
    TABLE.publish(rows, options.out)


if __name__ == "__main__":
    main()
