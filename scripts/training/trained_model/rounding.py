"""Differences between a parallel run of the small trained model and one process: rounding, and blocks it decides."""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import dataclass
from pathlib import Path

from matplotlib.figure import Figure
from rich.progress import Progress

from dbsp_core.reports.style import INK
from scripts.results.colours import MASKS
from scripts.results.figures import panels
from scripts.results.result import FOLDER, Result
from scripts.training.trained_model.demo import FIXED, PREDICTED, Settings, last_density, run_demo
from scripts.training.trained_model.small_model import MEASURED_HERE

WAYS = (("float64", PREDICTED), ("float64", FIXED), ("float32", FIXED), ("float32", PREDICTED))


@dataclass(frozen=True)
class Row:
    """max_abs_diff: of the final latents from one process, whose masks are predicted again"""

    dtype: str
    mask: str
    ranks: int
    steps: int
    density: float
    max_abs_diff: str
    label: str = MEASURED_HERE


def measure(dtype: str, mask: dict[str, object], ranks: int, steps: int) -> Row:
    settings = Settings(dtype=dtype, mask=mask, steps=steps, tolerance=float("inf"))
    with tempfile.TemporaryDirectory() as out, Progress(transient=True) as progress:
        report = run_demo(Path(out), ranks, progress, settings)
    density = last_density(report)
    return Row(dtype, str(mask["source"]), ranks, steps, density, f"{report.max_abs_diff:.1e}")


def draw(rows: list[Row]) -> Figure:
    figure, axes = panels(
        f"How far is a run on {rows[0].ranks} ranks from one process?",
        f"Largest difference of the final latents; {rows[0].label}, {rows[0].steps} steps; dotted: 1e-5",
        height=3.2,
    )
    (axis,) = axes[0]
    for height, row in enumerate(rows):
        difference = float(row.max_abs_diff)
        axis.barh(height, difference, 0.65, color=MASKS[row.mask])
        text = row.max_abs_diff if difference else "0: identical bits"
        axis.text(max(difference, 1e-7) * 1.15, height, text, va="center")
    axis.axvline(1e-5, color=INK, linestyle=":", linewidth=1.2)
    names = {"sparge": "predicted masks (sparge)", "radial": "fixed masks (radial)"}
    axis.set_yticks(range(len(rows)), [f"{row.dtype}, {names.get(row.mask, row.mask)}" for row in rows])
    axis.set(xscale="log", xlabel="largest difference of a latent", xlim=(1e-7, 2e-3))
    axis.invert_yaxis()
    axis.grid(axis="y", visible=False)
    return figure


ROUNDING = Result("rounding", "A parallel run against one process", Row, draw)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=8, help="denoising steps")
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder for the CSV and the PNG")
    options = parser.parse_args()
    rows = [measure(dtype, mask, options.ranks, options.steps) for dtype, mask in WAYS]
    ROUNDING.publish(rows, options.out)


if __name__ == "__main__":
    main()
