"""What separates a parallel run of the small trained model from one process: rounding, and blocks that it decides."""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import dataclass
from pathlib import Path

from matplotlib import pyplot
from matplotlib.figure import Figure
from rich.progress import Progress

from scripts.reproduce.common import RESULTS, publish
from scripts.training.trained_model.demo import FIXED, PREDICTED, Settings, run_demo
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
    density = sum(layer.density for layer in report.layers) / len(report.layers)
    return Row(dtype, str(mask["source"]), ranks, steps, density, f"{report.max_abs_diff:.1e}")


def draw(rows: list[Row]) -> Figure:
    figure, axes = pyplot.subplots(figsize=(6, 3.2), layout="constrained")
    axes.barh([f"{row.dtype}, {row.mask}" for row in rows], [float(row.max_abs_diff) for row in rows])
    axes.axvline(1e-5, color="k", linestyle=":")
    axes.set(xscale="log", xlabel="largest difference of the final latents from one process", title=MEASURED_HERE)
    axes.invert_yaxis()
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=8, help="denoising steps")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the CSV and the PNG")
    options = parser.parse_args()
    rows = [measure(dtype, mask, options.ranks, options.steps) for dtype, mask in WAYS]
    publish("rounding", "A parallel run against one process", rows, draw(rows), options.out)


if __name__ == "__main__":
    main()
